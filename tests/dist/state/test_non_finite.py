"""A step that is not finite is a worker's fault if a bit has flipped there, and the task's otherwise."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kit.processes.fleet import PATIENCE_S
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import ReplayMismatch, ReplicaMismatch, ReplicasEqual

SPEC: dict[str, Any] = {
    "batch": {"global_size": 12, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "health": {"checksum_every_steps": None},
}
"""The regular comparison is off: the step itself shows that something is wrong."""

LEFT = {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
"""A rank may still be in the exchange that showed the fault when another one has left it."""


def wait_for(job: Any, workers: list[Any], kind: type[Any]) -> Any:
    """The first report of this kind. The ranks then wait for the interrupt of a supervisor."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := job.reported(workers, kind)):
        assert time.monotonic() < deadline
    return found[0]


def test_a_bit_that_flips_to_infinity_in_one_of_two_replicas_is_that_worker_s_fault(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(2)
    workers[1].strike("forward", 3, "flip to inf")
    job.start(workers, layout=Layout(dp_replicate=2))
    found = wait_for(job, workers, ReplicaMismatch)
    exits = job.interrupt(workers)
    assert {e.kind for e in exits} <= LEFT and [e.step for e in exits] == [3] * 2, "not NON_FINITE"
    assert job.reported(workers, ReplicaMismatch) == [found]
    assert (found.ranks, found.is_certain, found.step) == ((1,), True, 3)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2), pytest.param(Layout(dp_replicate=2), marks=pytest.mark.matrix)], ids=["fsdp2", "dp2"]
)
def test_a_loss_that_is_finite_when_it_is_computed_again_is_that_worker_s_fault(make_job: Any, layout: Layout) -> None:
    """No sample of the first two steps: the proof reads these."""
    job = make_job(**SPEC, task="tiny_tasks:Spiking", model={"wrong": 1, "on": 21})
    workers = job.workers(2)
    job.start(workers, layout=layout)
    found = wait_for(job, workers, ReplayMismatch)
    exits = job.interrupt(workers)
    assert {e.kind for e in exits} <= LEFT
    assert job.reported(workers, ReplayMismatch) == [found]
    assert (found.rank, found.step) == (1, exits[0].step + 1)
    assert "is finite when it is computed again" in found.message


def test_a_loss_that_is_infinite_each_time_is_the_task_s_fault(make_job: Any) -> None:
    job = make_job(**SPEC, task="tiny_tasks:Spiking", model={"on": 9})
    workers = job.workers(2)
    exits = job.run(workers, layout=Layout(dp_replicate=2))
    assert [e.kind for e in exits] == [ExitKind.NON_FINITE] * 2
    assert job.reported(workers, ReplayMismatch) == job.reported(workers, ReplicaMismatch) == []
    assert [equal.step for equal in job.reported(workers[:1], ReplicasEqual)] == [exits[0].step]
