"""A mixture of sources over a lost worker and a change of size: the losses of one process in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.training_settings import TrainingSettings, settings_of
from shoal_workers.contract.worker_reports import GroupFormed

STEPS = 8


def _spec(directory: Path) -> dict[str, Any]:
    (directory / "web.txt").write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(200)))
    chats = [{"message": {"content": f"what is {n} times {n}? it is {n * n}."}} for n in range(100)]
    (directory / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    sources = [
        {"path": str(directory / "web.txt"), "name": "web", "weight": 0.7},
        {"path": str(directory / "chats.jsonl"), "name": "chats", "weight": 0.3, "field": "message.content"},
    ]
    return {
        "task": LM_TASK,
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16},
        "data": {"sources": sources, "cache_dir": str(directory / "cache"), "validation_fraction": 0},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 0.02},
        "schedule": {"warmup_steps": 2},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": 3},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": 4},
        "seed": 3,
    }


def test_a_kill_and_a_change_of_size_leave_the_order_as_it_is(make_job: Any, reference: Any, tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    job = make_job(**spec)
    workers = job.workers(3)
    workers[0].strike("forward", 4, "hold")
    job.start(workers)
    workers[0].reached()
    job.wait_until_committed(workers, 3)
    workers[1].strike("backward", 5, "kill")
    workers[0].call("go")
    assert workers[1].died()
    survivors = [workers[0], workers[2]]
    job.interrupt(survivors)
    grown = survivors + job.workers(2)
    assert [end.kind for end in job.run(grown)] == [ExitKind.FINISHED] * 4
    assert job.losses(grown) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
    assert job.reported(grown, GroupFormed)[-1].start_step == 3


def _changed(spec: dict[str, Any], at_step: int) -> tuple[dict[str, Any], TrainingSettings]:
    """The spec with other weights from a step on, and what a group learns of them."""
    changes = [{"at_step": at_step, "weights": {"web": 0.1, "chats": 0.9}}]
    spec = {**spec, "data": {**spec["data"], "changes": changes}}
    return spec, settings_of(parse_spec(spec))


def _lose(job: Any, workers: list[Any], step: int, checkpoint: int, **changes: Any) -> list[Any]:
    """Trains until `step` steps are completed and this checkpoint is committed, kills the last worker, and returns the
    others, which have left their group."""
    workers[0].strike("forward", step, "hold")
    job.start(workers, **changes)
    workers[0].reached()
    job.wait_until_committed(workers, checkpoint)
    workers[-1].kill()
    assert workers[-1].died()
    workers[0].call("go")
    job.interrupt(workers[:-1])
    return workers[:-1]


def test_weights_change_at_their_step_also_if_workers_die_before_and_after_it(
    make_job: Any, reference: Any, tmp_path: Path
) -> None:
    spec = _spec(tmp_path) | {"stop": {"steps": 12}}
    changed, settings = _changed(spec, at_step=6)
    job = make_job(**spec)
    workers = _lose(job, job.workers(3), 4, 3)  # of a group that knows of no change
    workers = _lose(job, workers + job.workers(2), 5, 3, settings=settings)  # before the step of the change
    workers = _lose(job, workers + job.workers(1), 8, 6, settings=settings)  # after it, from a checkpoint with it
    assert [end.kind for end in job.run(workers, settings=settings)] == [ExitKind.FINISHED] * len(workers)
    assert [formed.start_step for formed in job.reported(workers, GroupFormed)] == [0, 3, 3, 6]
    losses = job.losses(workers)
    assert losses == pytest.approx(reference(12, **changed), abs=1e-5)
    unchanged = reference(12, **spec)
    assert next(step for step in losses if abs(losses[step] - unchanged[step]) > 1e-4) == 6


def test_a_change_that_the_workers_learn_too_late_begins_with_them_and_stays_there(
    make_job: Any, reference: Any, tmp_path: Path
) -> None:
    spec = _spec(tmp_path) | {"stop": {"steps": 12}}
    _, settings = _changed(spec, at_step=2)
    job = make_job(**spec)
    workers = _lose(job, job.workers(3), 6, 6)
    workers = _lose(job, workers + job.workers(1), 6, 6, settings=settings)  # no step of it is completed
    assert any("take effect at step 7, later than planned" in line.text for line in workers[0].new_logs())
    workers = _lose(job, workers + job.workers(1), 10, 9, settings=settings)
    job.run(workers, settings=settings)
    assert [formed.start_step for formed in job.reported(workers, GroupFormed)] == [0, 6, 6, 9]
    assert job.losses(workers) == pytest.approx(reference(12, **_changed(spec, at_step=7)[0]), abs=1e-5)
