"""A lost node costs the steps since the last whole copies on other nodes; the losses stay those of a calm run."""

from __future__ import annotations

from typing import Any

import pytest

from kit.processes.slow_link import SlowLink
from shoal_workers.contract.worker_reports import SnapshotCost

STEPS = 12
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1.0},
    "seed": 3,
}


def _lose_a_node(job: Any, *, phase: str, step: int, world: int = 4, **changes: Any) -> Any:
    """Train until all ranks have entered `phase` after `step` steps, and kill all workers of node 2. Returns the
    survivors and their source."""
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
def test_a_lost_node_costs_the_steps_since_the_last_copies(make_job: Any, reference: Any, phase: str) -> None:
    job = make_job(memory=True, **SPEC)
    survivors, source = _lose_a_node(job, phase=phase, step=8)
    announced = [cost.buddy_step for cost in job.reported(survivors, SnapshotCost) if cost.buddy_step is not None]
    assert max(announced) <= source.step <= (9 if phase == "optimizer" else 8)
    job.finish(survivors, restore_snapshot=source)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_smaller_budget_means_more_repeated_steps(make_job: Any) -> None:
    spec = {**SPEC, "stop": {"steps": 40}, "snapshot": {"budget": 1e-6}}
    job = make_job(memory=True, **spec)
    _, source = _lose_a_node(job, phase="forward", step=38)
    assert source.step < 37


def test_copies_that_count_as_whole_outlive_the_beginning_of_the_next_ones(make_job: Any) -> None:
    """All ranks learn in one vote that the copies of a step are whole, and in the same vote the next ones may begin."""
    changes = {"task": "tiny_tasks:Augmenting", "stop": {"steps": 100_000}}
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
def test_a_node_that_dies_in_the_middle_of_a_phase_goes_back_to_the_last_copies(
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
    assert 0 < source.step <= (9 if phase == "optimizer" else 8)
    job.finish(here, restore_snapshot=source)
    assert job.losses(here) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_node_lost_right_after_a_re_formation_goes_back_to_what_the_group_began_with(
    make_job: Any, reference: Any
) -> None:
    """The snapshot of the old generation stays until a whole copy of the new one has arrived."""
    job = make_job(memory=True, **SPEC)
    here, there, spares = job.workers(2, "n1"), job.workers(2, "n2"), job.workers(2, "n3")
    workers = [*here, *there]
    for worker in workers:
        worker.strike("forward", 5, "hold")
    generation = job.start(workers, buddy_of=lambda rank: workers[(rank + 2) % 4])
    for worker in workers:
        worker.reached()
    for worker in there:
        worker.kill()
    for worker in here:
        worker.call("interrupt", generation)
        worker.call("go")
    source = job.in_memory(job.interrupt(here), here)
    assert 0 < (began := source.step) <= 5
    group = [*here, *spares]
    group[0].strike("forward", 7, "hold")
    generation = job.start(group, buddy_of=lambda rank: group[(rank + 2) % 4], restore_snapshot=source)
    group[0].reached()
    for worker in spares:
        worker.kill()
    group[0].call("interrupt", generation)
    group[0].call("go")
    source = job.in_memory(job.interrupt(here), here)
    assert began <= source.step <= 7
    job.finish(here, restore_snapshot=source)
    assert job.losses(here) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)
