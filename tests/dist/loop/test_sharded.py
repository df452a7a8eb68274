"""Loops whose models are sharded with FSDP2: their losses are those of one process in plain torch, also after a lost
worker and a change of size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import Layout, fully_sharded, replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "kit" / "loops" / "blocks.py"
STEPS = 8


def spec_of(how: str = "wrap", **more: Any) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(FILE.relative_to(ROOT)), "args": [str(STEPS), how]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "parallelism": {"dp_shard": "auto"},
        "snapshot": {"budget": 1.0},
        **more,
    }


def undisturbed(file: Path = FILE) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
    """Losses and logged numbers of one process in plain torch, by step."""
    losses, logged = plain_loop.undisturbed(file, str(STEPS), "whole")
    return losses, {step - 1: one for step, one in logged.items()}  # the plain run counts the step before it logs


def check(job: Any, workers: list[Any], *, after: int = 0) -> None:
    """Losses, the average of the parameters and a counter in a buffer are those of plain torch, in all steps `after`
    this one."""
    losses, logged = undisturbed()
    expected = {step: loss for step, loss in losses.items() if step > after}
    assert job.losses(workers) == pytest.approx(expected, abs=3e-7)
    for report in job.reports(workers[0]):
        metrics = {name: report.metrics[name] for name in ("average", "passes")}
        plain = {name: logged[report.step][name] for name in metrics}
        assert metrics == pytest.approx(plain, abs=1e-5), report.step


def share(job: Any, worker: Any) -> float:
    """Elements of the model's parameters that a rank keeps, as a fraction of all."""
    return float(job.reports(worker)[-1].metrics["parts"]) / undisturbed()[1][STEPS]["parts"]


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        ("wrap", fully_sharded(1)),
        ("wrap", fully_sharded(2)),
        ("wrap", fully_sharded(3)),
        ("blocks", fully_sharded(3)),
        ("hand", fully_sharded(2)),
        ("hand", replicated(2)),
        ("wrap", Layout(dp_replicate=2, dp_shard=2)),
        ("whole", fully_sharded(2)),
    ],
)
def test_a_sharded_loop_trains_at_any_size_as_plain_torch_does(make_job: Any, how: str, layout: Layout) -> None:
    job = make_job(memory=True, **spec_of(how))
    workers = job.workers(layout.world_size)
    ends = job.run(workers, layout=layout)
    assert [(e.kind, e.step, e.is_durable) for e in ends] == [(ExitKind.FINISHED, STEPS, True)] * len(workers), ends
    check(job, workers)
    parts = 1 if how == "whole" else layout.dp_shard
    assert share(job, workers[0]) == pytest.approx(1 / parts, abs=0.05)


@pytest.mark.slow
def test_two_sharded_models_with_updates_of_their_own_train_as_in_plain_torch(make_job: Any) -> None:
    file = FILE.with_name("sharded_gan.py")
    job = make_job(memory=True, **spec_of(loop={"file": str(file.relative_to(ROOT)), "args": [str(STEPS)]}))
    workers = job.workers(3)
    ends = job.run(workers, layout=fully_sharded(3))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 3, ends
    assert job.losses(workers) == pytest.approx(undisturbed(file)[0], abs=3e-7)


def test_the_log_says_that_nothing_is_sharded_although_the_spec_shards(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of("whole"))
    workers = job.workers(2)
    job.start(workers, layout=fully_sharded(2))
    assert [worker.exit().kind for worker in workers] == [ExitKind.FINISHED] * 2
    found = [[line.text for line in worker.new_logs() if "run.wrap(model)" in line.text] for worker in workers]
    assert [len(texts) for texts in found] == [1, 0], found


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "snapshot"])
def test_a_killed_rank_costs_at_most_one_step_and_changes_no_loss(make_job: Any, phase: str) -> None:
    job = make_job(memory=True, **spec_of())
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike(phase, 5, "kill")
    job.start(workers, layout=fully_sharded(3))
    assert victim.died()
    exits = job.interrupt(survivors)
    assert {e.kind for e in exits} <= {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
    source = job.in_memory(exits, survivors)
    assert source.step >= 4
    ends = job.run(survivors, layout=fully_sharded(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.reported(survivors, GroupFormed)[-1].start_step == source.step
    check(job, survivors)


def test_rank_0_may_die_and_another_worker_takes_its_place(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of("hand"))
    workers = job.workers(2)
    workers[0].strike("backward", 5, "kill")
    job.start(workers, layout=fully_sharded(2))
    assert workers[0].died()
    later = [workers[1], *job.workers(2)]
    source = job.in_memory(job.interrupt(workers[1:]), later)
    ends = job.run(later, layout=fully_sharded(3), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 3, ends
    check(job, later, after=source.step)


def test_at_the_same_size_the_losses_have_the_bits_of_the_undisturbed_run(make_job: Any) -> None:
    whole = make_job("whole", memory=True, **spec_of())
    workers = whole.workers(2)
    ends = whole.run(workers, layout=fully_sharded(2))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    job = make_job("killed", memory=True, **spec_of())
    first, victim = job.workers(2)
    victim.strike("backward", 5, "kill")
    job.start([first, victim], layout=fully_sharded(2))
    assert victim.died()
    exits, both = job.interrupt([first]), [first, *job.workers(1)]
    ends = job.run(both, layout=fully_sharded(2), restore_snapshot=job.in_memory(exits, both))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.losses(both) == whole.losses(workers)


def test_with_replicas_no_completed_step_is_repeated_although_copies_are_rare(make_job: Any) -> None:
    """Each part is on two ranks, of which one survives."""
    job = make_job(memory=True, **spec_of(snapshot={"budget": 1e-6}))
    workers = job.workers(4)
    victim, survivors = workers[1], [workers[0], *workers[2:]]
    source = job.lose(workers, victim, "backward", 6, layout=Layout(dp_replicate=2, dp_shard=2))
    ends = job.run(survivors, layout=fully_sharded(3), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 3, ends
    check(job, survivors)


def test_a_group_that_breaks_without_a_loss_repeats_no_completed_step(make_job: Any) -> None:
    """Each rank keeps its part when it leaves."""
    job = make_job(memory=True, **spec_of(snapshot={"budget": 1e-6}))
    workers = job.workers(2)
    for worker in workers:
        worker.strike("backward", 6, "hold")
    generation = job.start(workers, layout=fully_sharded(2))
    for worker in workers:
        worker.reached()
    for worker in workers:
        worker.call("interrupt", generation)
    for worker in workers:
        worker.call("go")
    source = job.in_memory([worker.exit() for worker in workers], workers)
    assert source.step == 6
    ends = job.run(workers, layout=fully_sharded(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    check(job, workers)


def test_a_lost_node_is_restored_from_the_buddies_on_the_other(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of())
    here, there = job.workers(2, "n1"), job.workers(2, "n2")
    workers = [*here, *there]
    workers[0].strike("forward", 6, "hold")
    generation = job.start(workers, layout=fully_sharded(4), buddy_of=lambda rank: workers[(rank + 2) % 4])
    workers[0].reached()
    for worker in there:
        worker.kill()
    workers[0].call("interrupt", generation)
    workers[0].call("go")
    source = job.in_memory(job.interrupt(here), here)
    assert source.generation == generation and 6 - source.step <= 2, source
    ends = job.run(here, layout=fully_sharded(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    check(job, here)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_a_change_of_size_repeats_no_step(make_job: Any, before: int, after: int) -> None:
    job = make_job(memory=True, **spec_of())
    workers = job.workers(before)
    workers[0].strike("forward", 4, "hold")
    generation = job.start(workers, layout=fully_sharded(before))
    workers[0].reached()
    workers[0].call("request_yield", generation, False)
    workers[0].call("go")
    exits = [worker.exit() for worker in workers]
    assert [(e.kind, e.step, e.is_durable) for e in exits] == [(ExitKind.YIELDED, 5, False)] * before, exits
    every = workers + job.workers(max(0, after - before))
    later = every[:after]
    ends = job.run(later, layout=fully_sharded(after), restore_snapshot=job.in_memory(exits, every))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * after, ends
    assert job.reported(later, GroupFormed)[-1].start_step == 5
    check(job, later)


@pytest.mark.parametrize(
    ("before", "after"),
    [(fully_sharded(3), fully_sharded(2)), (fully_sharded(2), replicated(2)), (replicated(2), fully_sharded(3))],
)
def test_a_checkpoint_goes_on_at_another_size_and_with_another_sharding(
    make_job: Any, before: Layout, after: Layout
) -> None:
    job = make_job(**spec_of("hand", checkpoint={"every_steps": 3}))
    workers = job.workers(before.world_size)
    workers[1].strike("forward", 7, "hold")
    job.start(workers, layout=before)
    workers[1].reached()
    job.wait_until_committed(workers, 6)
    workers[1].kill()
    survivors = [workers[0], *workers[2:]]
    job.interrupt(survivors)
    later = [*survivors, *job.workers(after.world_size - len(survivors))]
    ends = job.run(later, layout=after)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * after.world_size, ends
    assert job.reported(later, GroupFormed)[-1].start_step == 6
    check(job, later)
