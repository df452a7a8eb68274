"""Loops of a user's own: killed, grown and shrunk, their losses are those of the undisturbed run in one process."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, StepReport

STEPS = 8


def spec(name: str = "digits", **more: Any) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": f"tests/kit/loops/{name}.py"},
        "elasticity": {"max_workers": 4},
        "snapshot": {"budget": 1.0},
        **more,
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_loop_trains_at_any_size(make_job: Any, world_size: int) -> None:
    job = make_job(memory=True, **spec())
    workers = job.workers(world_size)
    ends = job.run(workers, layout=replicated(world_size))
    assert [(e.kind, e.step, e.is_durable) for e in ends] == [(ExitKind.FINISHED, STEPS, True)] * world_size, ends
    print(job.losses(workers))
