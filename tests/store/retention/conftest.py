"""Jobs that have ended, with a history."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingLog
from shoal_service.views import CheckpointView
from shoal_workers.contract.job import EndReason, JobState
from shoal_workers.contract.messages import LogStream


@pytest.fixture
def ended(submit: Callable[..., str], begin: Callable[..., Any]) -> Callable[..., str]:
    """A job that has trained `steps` steps, saved those named, and ended; its id."""

    def run(steps: int = 20, at: float = 100.0, saved: tuple[int, ...] = (10,), **changes: Any) -> str:
        job_id = submit(labels={"team": "sea"}, **changes)
        attempt = begin(job_id)
        attempt.report(
            JobState.RUNNING,
            series=tuple(_point(step) for step in range(1, steps + 1)),
            logs=tuple(_line(f"line {n}") for n in range(steps)),
            checkpoints=tuple(
                CheckpointView(step=step, url="/data/x", state="committed", attempt=1, generation=1) for step in saved
            ),
        )
        attempt.report(JobState.SUCCEEDED, end=AttemptEnd(reason=EndReason.FINISHED, step=steps, message=""), now=at)
        return job_id

    return run


def _point(step: int) -> SeriesPoint:
    values = {"loss": float(step), "grad_norm": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "step_s": 1.0}
    return SeriesPoint(step=step, at=float(step), world_size=1, generation=1, **values)


def _line(text: str) -> PendingLog:
    return PendingLog(at=1.0, rank=0, worker_id="w", stream=LogStream.STDOUT, text=text)
