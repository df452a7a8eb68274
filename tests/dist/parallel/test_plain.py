"""Plain replicas: each worker trains the task's own module with its own parameters, and the job is the plain run."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds.snapshot_spec import snapshot_spec
from shoal_workers.contract.exception_causes import LAYOUT_REFUSED
from shoal_workers.contract.layout import Layout, ShardLevel, fully_sharded, plain
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, StepReport, ValidationReport

STEPS = 8
SPEC = snapshot_spec(STEPS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plain_replicas_give_losses_and_norms_of_the_plain_run(make_job: Any, plain_run: Any, world_size: int) -> None:
    spec = {**SPEC, "validation": {"samples": 5}}
    job = make_job(memory=True, **spec)
    workers = job.workers(world_size)
    job.finish(workers, layout=plain(world_size))
    expected = plain_run({"task": "tiny_tasks:Counting", **spec})
    reports = job.reported(workers, StepReport)
    assert [r.loss for r in job.reported(workers, ValidationReport)] == pytest.approx([expected.validation], abs=1e-5)
    assert {r.step: r.loss for r in reports} == pytest.approx(expected.losses, abs=1e-5)
    assert {r.step: r.grad_norm for r in reports} == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "after"),
    [(plain(3), plain(2)), (plain(3), fully_sharded(2)), (fully_sharded(3), plain(2))],
    ids=["plain to plain", "plain to sharded", "sharded to plain"],
)
def test_a_killed_rank_costs_at_most_one_step(make_job: Any, reference: Any, layout: Layout, after: Layout) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(3)
    *survivors, victim = workers
    victim.strike("backward", 5, "kill")
    job.start(workers, layout=layout)
    assert victim.died()
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step in (4, 5), "a survivor may not have ended the step before"
    job.finish(survivors, layout=after, restore_snapshot=source)
    assert job.reported(survivors, GroupFormed)[-1].start_step == source.step
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [(plain(2), fully_sharded(3)), (fully_sharded(2), plain(3)), (plain(1), plain(2))],
    ids=["plain to sharded", "sharded to plain", "one to two"],
)
def test_a_checkpoint_of_one_kind_is_read_by_the_other(
    make_job: Any, reference: Any, first: Layout, second: Layout
) -> None:
    spec = {**SPEC, "checkpoint": {"every_steps": None}}
    job = make_job(**spec)
    workers = job.workers(3)
    group = workers[: first.world_size]
    group[0].strike("forward", 3, "hold")
    generation = job.start(group, layout=first)
    group[0].reached()
    group[-1].call("request_yield", generation, True)
    if first.world_size == 1:
        group[0].call("request_yield", generation, True)
    group[0].call("go")
    assert [worker.exit().kind for worker in group] == [ExitKind.YIELDED] * first.world_size
    job.commit(group)
    job.finish(workers[: second.world_size], layout=second)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_a_survivor_keeps_its_module_and_parameters_when_a_standby_takes_the_place_of_the_dead(
    make_job: Any, reference: Any
) -> None:
    job = make_job(memory=True, **SPEC)
    first, victim, spare = job.workers(3)
    victim.strike("backward", 4, "kill")
    job.start([first, victim], layout=plain(2))
    assert victim.died()
    exits = job.interrupt([first])
    before = first.call("model_id")
    source = job.in_memory(exits, [first])
    job.finish([first, spare], layout=plain(2), restore_snapshot=source)
    assert first.call("model_id") == before
    assert job.reported([first], GroupFormed)[-1].start_step == 4
    assert job.losses([first, spare]) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_a_lost_node_costs_no_completed_step_and_needs_no_buddy(make_job: Any, reference: Any) -> None:
    job = make_job(memory=True, **SPEC)
    here, there = job.workers(1, "n1")[0], job.workers(1, "n2")[0]
    source = job.lose([here, there], there, "forward", 5, layout=plain(2), buddy_of=lambda rank: None)
    (end,) = job.run([here], layout=plain(1), restore_snapshot=source)
    assert (end.kind, end.error) == (ExitKind.FINISHED, None)
    formed = job.reported([here], GroupFormed)[-1]
    assert (formed.start_step, formed.remote_bytes) == (5, 0)
    assert job.losses([here]) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_plain_replicas_whose_state_does_not_fit_are_refused_on_every_worker_and_a_sharded_group_follows(
    make_job: Any, reference: Any
) -> None:
    spec = {**SPEC, "worker": {"memory_gib": 1e-6}}
    job = make_job(memory=True, **spec)
    workers = job.workers(2)
    errors = [end.error for end in job.run(workers, layout=plain(2))]
    assert [error.mistake for error in errors] == [LAYOUT_REFUSED] * 2
    for error in errors:
        assert error.message.startswith("the whole state of the model does not fit on each worker: 2 on 127.0.0.1 need")
    job.finish(workers, layout=fully_sharded(2))
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


@pytest.mark.parametrize(
    ("world_size", "parallelism"), [(1, "auto"), (2, {"shard": "none"})], ids=["alone", "asked for"]
)
def test_one_worker_and_what_the_spec_asks_for_are_not_refused(
    make_job: Any, world_size: int, parallelism: Any
) -> None:
    job = make_job(**SPEC, worker={"memory_gib": 1e-6}, parallelism=parallelism)
    job.finish(job.workers(world_size), layout=plain(world_size))


KINDS = ("no_grad", "data", "assigned", "copied", "decayed", "once")
WRITING = {**SPEC, "task": "writing_tasks:Writing", "checkpoint": {"every_steps": 3}, "validation": {"samples": 4}}
ALONE = {"elasticity": {"max_workers": 1}, "snapshot": {"enabled": False}, "batch": {"global_size": 4, "micro_size": 4}}


def test_a_job_of_one_worker_without_snapshots_may_write_to_parameters_in_a_forward_pass(
    make_job: Any, plain_run: Any
) -> None:
    """It is killed in the pass after the checkpoint, and another worker goes on from there."""
    wrong: dict[str, Any] = {}
    for kind in KINDS:
        spec = {**WRITING, **ALONE, "model": {"kind": kind}}
        job = make_job(kind, memory=True, **spec)
        victim, other = job.workers(2)
        victim.strike("backward", 3, "hold")
        job.start([victim], layout=plain(1))
        victim.reached()
        job.wait_until_committed([victim], 3)
        victim.kill()
        assert victim.died()
        (end,) = job.run([other], layout=plain(1))
        assert (end.kind, end.error) == (ExitKind.FINISHED, None), kind
        assert job.reported([other], GroupFormed)[-1].start_step == 3
        expected = plain_run(spec)
        losses, norms = job.losses([victim, other]), {r.step: r.grad_norm for r in job.reported([other], StepReport)}
        (validation,) = {r.loss for r in job.reported([other], ValidationReport)}
        is_right = losses == pytest.approx(expected.losses, abs=1e-5) and norms == pytest.approx(
            {step: norm for step, norm in expected.norms.items() if step > 3}, rel=1e-4
        )
        if not is_right or validation != pytest.approx(expected.validation, abs=1e-5):
            wrong[kind] = losses, expected.losses
    assert wrong == {}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (plain(2), {"elasticity": {"max_workers": 2}, "batch": {"global_size": 4, "micro_size": 2}}),
        (plain(1), {"batch": {"global_size": 4, "micro_size": 2}}),
        (plain(1), {"snapshot": {"enabled": True}}),
        (fully_sharded(1), {}),
    ],
    ids=["two workers", "micro-batches", "snapshots", "sharded"],
)
def test_other_jobs_may_not_write_to_parameters(make_job: Any, layout: Layout, changes: Any) -> None:
    not_refused = []
    for kind in ("assigned", "decayed"):
        job = make_job(kind, **{**WRITING, **ALONE, **changes, "model": {"kind": kind}})
        for end in job.run(job.workers(layout.world_size), layout=layout):
            if end.error is None or "writes to the parameter line." not in end.error.message:
                not_refused.append((kind, end))
    assert not_refused == []


@pytest.mark.parametrize("layout", [plain(1), plain(2), fully_sharded(2)], ids=Layout.describe)
def test_a_frozen_parameter_that_the_passes_change_is_refused_before_the_first_step(
    make_job: Any, layout: Layout
) -> None:
    not_refused = []
    for kind in ("no_grad", "data", "assigned", "backward"):
        job = make_job(kind, **{**WRITING, "task": "writing_tasks:Teaching", "model": {"kind": kind}})
        workers = job.workers(layout.world_size)
        for worker, end in zip(workers, job.run(workers, layout=layout), strict=True):
            is_refused = end.kind is ExitKind.USER_ERROR and end.error is not None
            # A gathered copy forgets what is written to it, so a sharded model differs from the whole one.
            named = (
                ("teacher.weight",) if layout.shard is ShardLevel.NONE else ("teacher.weight", "trains another model")
            )
            if not is_refused or not any(part in end.error.message for part in named) or job.reports(worker):
                not_refused.append((kind, end))
    assert not_refused == []
