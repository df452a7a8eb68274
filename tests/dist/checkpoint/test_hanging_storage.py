"""Storage that hangs instead of failing: a named pipe in the place of a file, whose opening blocks until it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.processes.fleet import RemoteWorker
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed, StepReport

SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "checkpoint": {"every_steps": 4},
    "validation": {"samples": 0},
    "timeouts": {"save_s": 5.0},  # storage that answers does so within it, also on a busy machine
    "elasticity": {"max_workers": 2},
}


def block(root: str, step: int, rank: int) -> Path:
    """The storage never answers the save of this step on this rank, until `answer`."""
    directory = Path(root) / str(CheckpointName(step, 1, 1))
    directory.mkdir(parents=True)
    pipe = directory / f"shard-{rank:05d}.bin.writing"
    os.mkfifo(pipe)
    return pipe


def answer(pipe: Path) -> None:
    """The storage answers the call that hung: with an error, since a pipe cannot be synced."""
    descriptor = os.open(pipe, os.O_RDONLY)
    while os.read(descriptor, 1 << 16):
        pass
    os.close(descriptor)


def failed(worker: RemoteWorker) -> list[tuple[int, bool]]:
    return [(item.step, item.is_stalled) for item in worker.poll() if isinstance(item, SaveFailed)]


def steps(worker: RemoteWorker) -> list[int]:
    return [item.step for item in worker.poll() if isinstance(item, StepReport)]


def test_storage_that_hangs_stops_no_training_and_is_used_again_once_it_answers(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]]
) -> None:
    job = make_job(**SPEC, stop={"steps": 20})
    workers = job.workers(2)
    pipe = block(job.root, 4, 1)
    workers[0].strike("forward", 14, "hold")
    job.start(workers)
    assert workers[0].reached() == ("forward", 14)
    assert failed(workers[1]) == [(4, True), (8, True), (12, True)], "one deadline, then each save fails at once"
    assert failed(workers[0]) == [] and steps(workers[0]) == list(range(1, 15))

    answer(pipe)
    while not any("the storage answers again" in line.text for line in workers[1].new_logs()):
        pass
    workers[0].call("go")
    exits = [worker.exit() for worker in workers]
    assert [(one.kind, one.step, one.is_durable) for one in exits] == [(ExitKind.FINISHED, 20, True)] * 2
    saved = [[item.step for item in worker.poll() if isinstance(item, SavedPart)] for worker in workers]
    assert saved == [[4, 8, 12, 16, 20], [16, 20]]
    assert [one.saved_part.rank for one in exits] == [0, 1]
    losses = {item.step: item.loss for item in workers[0].reports if isinstance(item, StepReport)}
    assert list(losses) == list(range(1, 21))
    expected = reference(20, **SPEC, stop={"steps": 20})
    assert max(abs(losses[step] - expected[step]) for step in losses) < 1e-5, "at every step"


def test_storage_that_hangs_at_the_end_fails_the_save_of_the_result(make_job: Callable[..., Any]) -> None:
    job = make_job(**SPEC, stop={"steps": 4})
    [worker] = job.workers(1)
    pipe = block(job.root, 4, 0)
    job.start([worker])
    worker_exit = worker.exit()
    assert (worker_exit.kind, worker_exit.step) == (ExitKind.STORAGE_FAILED, 4)
    assert worker_exit.error is not None and "timeouts.save_s" in worker_exit.error.message
    answer(pipe)
