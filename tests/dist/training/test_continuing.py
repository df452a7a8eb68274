"""A job that goes on from another job's checkpoint, or with changed settings: the losses against those of one run.

one run        1 .. 4 | 5 .. 8
first job      1 .. 4, its checkpoint of step 4
new job                 5 .. 8, in another layout: the same losses
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.schedules import ScheduleSpec
from shoal_workers.contract.spec import StopSpec, ValidationSpec
from shoal_workers.contract.training_settings import TrainingSettings
from shoal_workers.contract.worker_reports import GroupFormed, StepReport, ValidationReport

SPEC: dict[str, Any] = {
    "stop": {"steps": 8},
    "schedule": {"name": "linear", "warmup_steps": 2},
    "checkpoint": {"every_steps": 4},
    "batch": {"global_size": 4, "micro_size": 1},
}


def _losses(job: Any, worker: Any) -> dict[int, float]:
    return {item.step: item.loss for item in job.reported([worker], StepReport)}


@pytest.fixture(scope="module")
def first(_zygote_fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An undisturbed run of 8 steps: its losses, and the directory of its checkpoints."""
    from kit.processes.fleet import Job

    root = tmp_path_factory.mktemp("first")
    job = Job(_zygote_fleet, SPEC, root, None)
    group = job.workers(2)
    job.finish(group)
    losses = _losses(job, group[0])
    _zygote_fleet.kill_all()
    return losses, {Path(directory).name[:17]: directory for directory in job.committed}


def _from(first: Any, step: int) -> dict[str, Any]:
    url = first[1][f"step-{step:012d}"]
    return {"job": "job-a", "step": step, "checkpoint": Path(url).name, "url": url}


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("world", [2, 3])
def test_it_goes_on_with_the_losses_of_the_undisturbed_run_in_another_layout(
    first: Any, make_job: Any, world: int
) -> None:
    origin = _from(first, 4)
    before = sorted(path.name for path in Path(origin["url"]).parent.rglob("*"))
    job = make_job("new", **SPEC, continue_from=origin)
    group = job.workers(world)
    job.finish(group, restore_from=origin["url"])
    losses = _losses(job, group[0])
    assert sorted(losses) == [5, 6, 7, 8]
    assert [formed.past for formed in job.reported(group, GroupFormed)] == [()], "its series has only steps of its own"
    expected = {step: first[0][step] for step in losses}
    assert losses == (expected if world == 2 else pytest.approx(expected, rel=1e-6)), "bit for bit in the same layout"
    assert [Path(directory).parent.name for directory in job.committed] == ["new"]
    assert sorted(path.name for path in Path(origin["url"]).parent.rglob("*")) == before, (
        "the other job's are only read"
    )


def test_the_optimizer_has_the_settings_of_the_new_spec(first: Any, make_job: Any) -> None:
    origin = _from(first, 4)

    def losses(name: str, **optimizer: float) -> dict[int, float]:
        job = make_job(name, **SPEC, optimizer=optimizer, continue_from=origin)
        group = job.workers(1)
        job.run(group, restore_from=origin["url"])
        return _losses(job, group[0])

    same, rate, decay = losses("a"), losses("b", lr=1e-2), losses("c", weight_decay=5.0)
    for changed in (rate, decay):
        assert changed[5] == pytest.approx(same[5], rel=1e-6), "before the first update"
        assert abs(changed[8] - same[8]) > 1e-4


def test_a_job_of_which_nothing_is_left_saves_the_state_as_its_own(first: Any, make_job: Any) -> None:
    origin = _from(first, 8)
    job = make_job("new", **SPEC, continue_from=origin)
    group = job.workers(1)
    (end,) = job.run(group, restore_from=origin["url"])
    assert end.kind is ExitKind.FINISHED
    assert [Path(directory).parent.name for directory in job.committed] == ["new"]


def test_another_model_is_refused_in_words(first: Any, make_job: Any) -> None:
    origin = _from(first, 4)
    job = make_job("new", **SPEC, model={"dim": 5}, continue_from=origin)
    (end,) = job.run(job.workers(1), restore_from=origin["url"])
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "does not fit this model and optimizer" in end.error.message


def test_a_longer_stop_at_a_step_boundary_gives_the_losses_of_a_job_that_had_it_from_the_start(make_job: Any) -> None:
    schedule = {"name": "linear", "warmup_steps": 2, "steps": 12}
    whole = make_job("whole", **SPEC | {"stop": {"steps": 12}, "schedule": schedule})
    group = whole.workers(2)
    whole.run(group)
    expected = _losses(whole, group[0])

    job = make_job("job", memory=True, **SPEC | {"stop": {"steps": 6}, "schedule": schedule})
    group = job.workers(2)
    group[0].strike("forward", 3, "hold")
    job.start(group)
    group[0].reached()
    for worker in group:
        worker.call("request_yield", job.generation)
    group[0].call("go")
    exits = [worker.exit() for worker in group]
    assert {end.kind for end in exits} == {ExitKind.YIELDED} and exits[0].step == 4
    settings = TrainingSettings(
        stop=StopSpec(steps=12),
        schedule=ScheduleSpec.model_validate(schedule),
        validation=ValidationSpec(every_steps=5),
        lr=3e-4,
    )
    source = job.in_memory(exits, group)
    job.finish(group, restore_snapshot=source, restore_from=None, settings=settings, layout=fully_sharded(2))
    assert _losses(job, group[0]) == expected
    assert [item.step for item in job.reported([group[0]], ValidationReport)] == [5, 10, 12]


def test_a_stop_that_is_shorter_than_what_is_done_ends_there(make_job: Any) -> None:
    job = make_job("job", memory=True, **SPEC)
    group = job.workers(1)
    group[0].strike("forward", 4, "hold")
    job.start(group)
    group[0].reached()
    group[0].call("request_yield", job.generation)
    group[0].call("go")
    exits = [group[0].exit()]
    settings = TrainingSettings(stop=StopSpec(steps=3), schedule=ScheduleSpec(), validation=ValidationSpec(), lr=3e-4)
    source = job.in_memory(exits, group)
    (end,) = job.run(group, restore_snapshot=source, restore_from=None, settings=settings)
    assert (end.kind, end.step) == (ExitKind.FINISHED, 5)
