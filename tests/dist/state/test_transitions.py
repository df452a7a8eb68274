"""From any layout to any other: model and moments arrive bit for bit, and the losses are those of an undisturbed run.

old layout       steps 1, 2, state kept in memory and on disk  |  asked to yield, or a rank dies in step 3
new layout       restored from memory: the same bits?          |  to the end: the undisturbed run's losses?
new layout       restored from disk: the same bits?            |  to the end: the undisturbed run's losses?
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import transition_cases
from kit.worlds.layout_cases import spec_of
from kit.worlds.transition_cases import STEPS, SWITCH
from kit.worlds.whole_states import assert_same_bits, whole
from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.messages import ExitKind, WorkerExit
from shoal_workers.contract.spec import plan_of

_CHANGES = {
    "batch": {"global_size": 6, "micro_size": 1},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": SWITCH},
    "snapshot": {"budget": 1.0},
}


def _cells() -> list[Any]:
    sampled = {case.name for case in transition_cases.sample()}
    return [
        pytest.param(case, id=case.name, marks=() if case.name in sampled else pytest.mark.matrix)
        for case in transition_cases.all_transitions()
    ]


@pytest.mark.parametrize("case", _cells())
def test_a_transition_moves_every_bit_and_changes_no_loss(case: Any, make_job: Any, plain_run: Any, text: str) -> None:
    spec = spec_of(case.model, text, **_CHANGES)
    plain = plain_run(spec)
    job = make_job(memory=True, **spec)
    group = job.workers(case.old.world_size)
    for worker in group:
        worker.strike("snapshot", SWITCH, "dump")
    survivors, exits = _die(case, job, group) if case.is_kill else _yield(case, job, group)
    before = whole([worker.dumped() for worker in group])
    (directory,) = job.committed
    source = job.in_memory(exits, survivors)
    assert source.step == SWITCH
    next_group = survivors[: case.new.world_size]
    next_group += job.workers(case.new.world_size - len(next_group))
    for restore in ({"restore_snapshot": source, "restore_from": None}, {"restore_from": directory}):
        for worker in next_group:
            worker.strike("forward", SWITCH, "dump")
        job.finish(next_group, layout=case.new, **restore)
        assert_same_bits(before, whole([worker.dumped() for worker in next_group]))
        losses = {r.step: r.loss for r in job.reports(next_group[0])}
        expected = {step: loss for step, loss in plain.losses.items() if step > SWITCH}
        assert losses == pytest.approx(expected, abs=1e-5)
    assert {**plain.losses} == pytest.approx(job.losses(list({*group, *next_group})), abs=1e-5)


def _yield(case: Any, job: Any, group: list[Any]) -> tuple[list[Any], list[WorkerExit]]:
    """The yield is requested while rank 0 is held in step 2: the group stops after that step."""
    first = group[0]
    first.strike("forward", SWITCH - 1, "hold")
    generation = job.start(group, layout=case.old, restore_from=None)
    first.reached()
    first.call("request_yield", generation, True)
    first.call("go")
    exits = [worker.exit() for worker in group]
    assert [one.kind for one in exits] == [ExitKind.YIELDED] * len(exits), [one.error for one in exits]
    job.commit(group)
    return group, exits


def _die(case: Any, job: Any, group: list[Any]) -> tuple[list[Any], list[WorkerExit]]:
    """One rank is killed in step 3, before any update."""
    victim = group[case.victim]
    victim.strike(case.phase, SWITCH, "hold")
    job.start(group, layout=case.old, restore_from=None)
    victim.reached()
    job.wait_until_committed(group, SWITCH)
    victim.kill()
    survivors = [worker for worker in group if worker is not victim]
    exits = job.interrupt(survivors)
    return survivors, exits


def test_the_pairs_are_many_legal_and_cover_every_axis() -> None:
    cases = transition_cases.all_transitions()
    pairs = {(case.model, case.old, case.new) for case in cases}
    assert len(pairs) >= 40
    assert len({(model, old, new) for model, old, new in pairs if old != new}) == len(pairs)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        for is_kill in (False, True):
            before_after = {(getattr(c.old, axis) > 1, getattr(c.new, axis) > 1) for c in cases if c.is_kill is is_kill}
            assert {(False, True), (True, False)} <= before_after, axis
    for model in ("dense", "experts"):
        spec = parse_spec(spec_of(model, "unused"))
        for layout in {layout for name, *both in pairs if name == model for layout in both}:
            assert violations(layout, spec, plan_of(spec)) == ()
