"""A rank whose node fails reports the class of the fault, also if the task's code was running; others do not."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.messages import ExitKind

SPEC: dict[str, Any] = {
    "task": "tiny_tasks:Breaking",
    "batch": {"global_size": 12, "micro_size": 2},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 3},
}
OTHERS = {ExitKind.COLLECTIVE_FAILED, ExitKind.INTERRUPTED}


@pytest.mark.parametrize(
    ("fault", "error_class", "words"),
    [
        ("disk", ErrorClass.SYSTEM, f"[Errno {errno.ENOSPC}]"),
        ("memory", ErrorClass.HOST_MEMORY, "can't allocate memory"),
        ("device", ErrorClass.DEVICE, "unspecified launch failure"),
    ],
)
def test_one_rank_reports_the_fault_of_its_node(make_job: Any, fault: str, error_class: ErrorClass, words: str) -> None:
    job = make_job(**{**SPEC, "model": {"fault": fault, "on": 17}})
    workers = job.workers(3)
    job.start(workers)
    job.wait_for_an_exit()
    exits = job.interrupt(workers)
    [failed] = [e for e in exits if e.kind is ExitKind.WORKER_FAULT]
    assert {e.kind for e in exits if e is not failed} <= OTHERS
    assert (failed.error.error_class, failed.error.origin) == (error_class, Origin.TASK)
    assert words in failed.error.message and "tiny_tasks.py" in failed.error.traceback


def test_a_worker_that_raised_trains_on_in_the_next_generation(make_job: Any) -> None:
    job = make_job(**{**SPEC, "model": {"fault": "disk", "on": 17}})
    (worker,) = job.workers(1)
    assert job.run([worker])[0].kind is ExitKind.WORKER_FAULT
    assert job.run([worker])[0].kind is ExitKind.WORKER_FAULT, "at the same step, so the supervisor gives up"
