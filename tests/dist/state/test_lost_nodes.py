"""A lost node costs no completed step, or one: the buddy replays what the node's ranks have logged, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from kit.processes.slow_link import SlowLink
from kit.worlds.layout_cases import spec_of
from kit.worlds.whole_states import assert_same_bits, whole
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import ReplicaMismatch, SnapshotCost

STEPS = 12
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "seed": 3,
}


def _lose_a_node(job: Any, *, phase: str, step: int, world: int = 4, **changes: Any) -> Any:
    """Train until all ranks have entered `phase` after `step` steps, so that each has sent its commit of this step;
    kill all workers of node 2. Returns the survivors and their source."""
    here, there = job.workers(world // 2, "n1"), job.workers(world // 2, "n2")
    workers = [*here, *there]
    for worker in workers:
        worker.strike(phase, step, "hold")
    generation = job.start(workers, buddy_of=lambda rank: workers[(rank + world // 2) % world], **changes)
    for worker in workers:
        worker.reached()
    for worker in there:
        worker.kill()
    for worker in there:
        assert worker.died()
    for worker in here:
        worker.call("interrupt", generation)
        worker.call("go")
    exits = job.interrupt(here)
    return here, job.in_memory(exits, here)


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_lost_node_costs_no_completed_step(make_job: Any, reference: Any, phase: str) -> None:
    job = make_job(memory=True, **SPEC)
    survivors, source = _lose_a_node(job, phase=phase, step=8)
    expected = (8, 9) if phase == "optimizer" else (8,)  # step 9 is complete once the vote has accepted it
    assert source.step in expected
    job.finish(survivors, restore_snapshot=source)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)
    costs = job.reported(survivors, SnapshotCost)
    assert [cost for cost in costs if cost.log_lag_steps is not None], "the log was in force"


def test_without_the_log_a_lost_node_costs_the_steps_since_the_last_copies(make_job: Any, reference: Any) -> None:
    """What the log is for: copies are as seldom as the budget, which is smaller here than the shipped one."""
    spec = {**SPEC, "stop": {"steps": 40}, "snapshot": {"gradient_log": "off", "budget": 1e-6}}
    job = make_job(memory=True, **spec)
    survivors, source = _lose_a_node(job, phase="forward", step=38)
    assert source.step < 37
    assert {cost.log_reason for cost in job.reported(survivors, SnapshotCost)} == {"snapshot.gradient_log is off"}


def test_copies_that_count_as_whole_outlive_the_beginning_of_the_next_ones(make_job: Any) -> None:
    """All ranks learn in one vote that the copies of a step are whole, and in the same vote the next ones may begin."""
    changes = {"task": "tiny_tasks:Augmenting", "stop": {"steps": 100_000}, "snapshot": {"budget": 1.0}}
    job = make_job(memory=True, **{**SPEC, **changes})
    here, there = job.workers(1, "n1")[0], job.workers(1, "n2")[0]
    link = SlowLink(here.snapshot_server, let_through=2)
    job.start([here, there], buddy_of=lambda rank: [there, link][rank])
    assert link.holds_back.wait(60), "two copies of rank 1 have arrived, and the third is on its way"
    there.kill()
    source = job.in_memory(job.interrupt([here]), [here])
    announced = [cost.buddy_step for cost in job.reported([here], SnapshotCost) if cost.buddy_step is not None]
    link.close()
    assert source.step == max(announced)


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("action", ["kill", pytest.param("kill within", marks=pytest.mark.matrix)])
def test_a_node_that_dies_in_the_middle_of_a_phase_costs_at_most_one_step(
    make_job: Any, reference: Any, phase: str, action: str
) -> None:
    """Its two ranks die on their own way through the step, not all at one moment."""
    if action == "kill within" and phase != "optimizer":
        pytest.skip("within an update only")
    job = make_job(memory=True, **SPEC)
    here, there = job.workers(2, "n1"), job.workers(2, "n2")
    workers = [*here, *there]
    for worker in there:
        worker.strike(phase, 8, action)
    job.start(workers, buddy_of=lambda rank: workers[(rank + 2) % 4])
    for worker in there:
        assert worker.died()
    source = job.in_memory(job.interrupt(here), here)
    assert source.step in ((8, 9) if phase == "optimizer" else (8,))
    job.finish(here, restore_snapshot=source)
    assert job.losses(here) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_node_lost_right_after_a_re_formation_costs_at_most_one_step(make_job: Any, reference: Any) -> None:
    """The first whole copy of the new generation has arrived before the snapshot of the old one is overwritten."""
    job = make_job(memory=True, **SPEC)
    here, there, spares = job.workers(2, "n1"), job.workers(2, "n2"), job.workers(2, "n3")
    workers = [*here, *there]
    for worker in workers:
        worker.strike("forward", 5, "hold")
    generation = job.start(workers, buddy_of=lambda rank: workers[(rank + 2) % 4])
    for worker in workers:
        worker.reached()  # each has sent its commit of step 5
    for worker in there:
        worker.kill()
    for worker in here:
        worker.call("interrupt", generation)
        worker.call("go")
    source = job.in_memory(job.interrupt(here), here)
    assert source.step == 5
    group = [*here, *spares]
    group[0].strike("forward", 7, "hold")
    generation = job.start(group, buddy_of=lambda rank: group[(rank + 2) % 4], restore_snapshot=source)
    group[0].reached()
    for worker in spares:
        worker.kill()
    group[0].call("interrupt", generation)
    group[0].call("go")
    source = job.in_memory(job.interrupt(here), here)
    assert source.step in (6, 7)
    job.finish(here, restore_snapshot=source)
    assert job.losses(here) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def _cells() -> list[Any]:
    cases: list[tuple[str, Layout, dict[str, Any]]] = [
        ("dense", Layout(dp_shard=4), {}),
        ("dense", Layout(dp_shard=4), {"precision": "bf16", "reduce_precision": "bf16"}),
        ("dense", Layout(dp_shard=2, tp=2), {}),
        ("dense", Layout(pp=2, dp_shard=2), {}),
        ("dense", Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)), {}),
        ("dense", Layout(dp_shard=4), {"deterministic": True}),
        ("experts", Layout(dp_shard=4, ep=2), {}),
    ]
    kept = {1, 3}
    return [
        pytest.param(
            *case, id=f"{case[0]} {case[1].describe()} {case[2]}", marks=() if i in kept else pytest.mark.matrix
        )
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("model", "layout", "changes"), _cells())
def test_the_buddies_replay_every_bit_in_any_layout(
    make_job: Any, text: str, model: str, layout: Layout, changes: dict[str, Any]
) -> None:
    """Half of the ranks lose their node; all ranks of the next group then have the bits that the lost ones had."""
    steps = 6
    spec = spec_of(model, text, batch={"global_size": 8, "micro_size": 1}, stop={"steps": steps + 2}, **changes)
    job = make_job(memory=True, **spec)
    half = layout.world_size // 2
    here, there, spares = job.workers(half, "n1"), job.workers(half, "n2"), job.workers(half, "n1")
    workers = [*here, *there]
    for worker in workers:
        worker.strike("forward", steps, "dump")
    workers[0].strike("backward", steps, "hold")
    generation = job.start(workers, buddy_of=lambda rank: workers[(rank + half) % len(workers)], layout=layout)
    before = whole([worker.dumped() for worker in workers])
    workers[0].reached()
    for worker in there:
        worker.kill()
    workers[0].call("interrupt", generation)
    workers[0].call("go")
    source = job.in_memory(job.interrupt(here), here)
    assert source.step == steps
    group = [*here, *spares]
    for worker in group:
        worker.strike("forward", steps, "dump")
    job.finish(group, restore_snapshot=source, layout=layout)
    assert_same_bits(before, whole([worker.dumped() for worker in group]))
    costs = job.reported(here, SnapshotCost)
    assert [cost for cost in costs if cost.log_lag_steps is not None], {cost.log_reason for cost in costs}


@pytest.mark.parametrize("task", [pytest.param("tiny_tasks:Momentum", marks=pytest.mark.matrix), "tiny_tasks:OwnRule"])
@pytest.mark.parametrize("phase", ["backward", pytest.param("optimizer", marks=pytest.mark.matrix)])
def test_an_elementwise_optimizer_of_the_task_is_replayed_bit_for_bit(
    make_job: Any, reference: Any, task: str, phase: str
) -> None:
    steps = 6
    spec = {**SPEC, "task": task, "stop": {"steps": steps + 2}}
    job = make_job(memory=True, **spec)
    here, there, spare = (job.workers(1, node)[0] for node in ("n1", "n2", "n1"))
    workers, kept = [here, there], steps if phase == "backward" else steps + 1
    for worker in workers:
        worker.strike("forward", kept, "dump")
    here.strike(phase, steps, "hold")
    generation = job.start(workers, buddy_of=lambda rank: workers[1 - rank])
    before = whole([worker.dumped() for worker in workers]) if phase == "backward" else None
    here.reached()
    there.kill()
    assert there.died()
    here.call("interrupt", generation)
    here.call("go")
    source = job.in_memory(job.interrupt([here]), [here])
    assert source.step in {steps, kept}
    group = [here, spare]
    for worker in group:
        worker.strike("forward", source.step, "dump")
    job.finish(group, restore_snapshot=source)
    if before is not None:
        assert_same_bits(before, whole([worker.dumped() for worker in group]))
    assert job.losses(group) == pytest.approx(reference(steps + 2, **spec), abs=1e-5)
    reasons = {cost.log_reason for cost in job.reported([here], SnapshotCost)}
    assert "" in reasons, reasons


@pytest.mark.matrix
def test_an_optimizer_that_its_task_declares_not_elementwise_keeps_copies(make_job: Any) -> None:
    job = make_job(memory=True, **{**SPEC, "task": "tiny_tasks:Augmenting", "stop": {"steps": 4}})
    workers = [job.workers(1, "n1")[0], job.workers(1, "n2")[0]]
    job.finish(workers, buddy_of=lambda rank: workers[1 - rank])
    reasons = {cost.log_reason for cost in job.reported(workers, SnapshotCost)}
    assert reasons == {"the task says elementwise_optimizer = False"}


def test_a_bit_that_flips_in_memory_is_found_by_the_buddy(make_job: Any) -> None:
    """The next whole copy differs from what the buddy replays from the gradients."""
    job = make_job(memory=True, **{**SPEC, "stop": {"steps": 60}})
    workers = [job.workers(1, "n1")[0], job.workers(1, "n2")[0]]
    workers[1].strike("forward", 10, "flip")
    job.start(workers, buddy_of=lambda rank: workers[1 - rank])
    assert [worker.exit().kind for worker in workers] == [ExitKind.FINISHED] * 2
    (found,) = job.reported(workers, ReplicaMismatch)
    assert (found.ranks, found.is_certain) == ((1, 0), False)
    assert "differs from what its buddy, rank 0, has replayed" in found.message
