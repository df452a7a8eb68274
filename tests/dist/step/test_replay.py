"""A rank that computes wrong last bits is named before its step is applied, and the other ranks continue."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kit.processes.fleet import PATIENCE_S
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import ReplayMismatch

SPEC: dict[str, Any] = {
    "task": "tiny_tasks:Lying",
    "batch": {"global_size": 16, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "health": {"replay_every_steps": 2},
}

LEFT = {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
"""A rank may still be in the exchange that showed the fault when another one has left it."""


def accusations(workers: list[Any]) -> list[tuple[int, int]]:
    return [(item.rank, item.step) for worker in workers for item in worker.poll() if isinstance(item, ReplayMismatch)]


def test_the_rank_that_computes_wrong_is_named_and_its_step_is_not_applied(make_job: Any, reference: Any) -> None:
    spec = {**SPEC, "model": {"liar": 3}, "health": {"replay_every_steps": 1}}
    job = make_job(**spec)
    workers = job.workers(4)
    job.start(workers)
    deadline = time.monotonic() + PATIENCE_S
    while not accusations(workers[:1]):
        assert time.monotonic() < deadline
    workers[3].kill()
    exits = job.interrupt(workers[:3])
    assert {e.kind for e in exits} <= LEFT and [e.step for e in exits] == [0] * 3
    assert accusations(workers[:3]) == [(3, 1)]
    job.finish(workers[:3])
    assert job.losses(workers[:3]) == pytest.approx(reference(6, **spec), abs=1e-5)


def test_without_a_supervisor_all_ranks_leave_with_the_reason(make_job: Any) -> None:
    job = make_job(**{**SPEC, "model": {"liar": 1}})
    workers = job.workers(3)
    exits = job.run(workers, collective_timeout_s=8.0)
    assert [(e.kind, e.step) for e in exits] == [(ExitKind.COLLECTIVE_FAILED, 1)] * 3
    assert all("rank 1 computes wrong" in e.error.message for e in exits)


def test_honest_ranks_are_never_named(make_job: Any, reference: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(3)
    job.finish(workers)
    assert accusations(workers) == []
    assert job.losses(workers) == pytest.approx(reference(6, **SPEC), abs=1e-5)
