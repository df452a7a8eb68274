"""A rank of a pipeline dies: ranks that wait for it in a send or receive, directly or indirectly, are woken.

Neighbours see the connection break. Other ranks wait for ranks that are alive, and wait until they are interrupted.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds.layout_cases import spec_of
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind

_ROUNDS = 3
_CASES = {
    "pp4, of whose survivors one is no neighbour": (Layout(pp=4), 1),
    "pp2xtp2": (Layout(pp=2, tp=2), 3),
}
_MORE = {
    "pp2": (Layout(pp=2), 1),
    "pp2 zbv": (Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)), 0),
}


@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.matrix), "backward"])
@pytest.mark.parametrize("case", [*_CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in _MORE)])
def test_survivors_of_a_pipeline_leave_and_continue_training(make_job: Any, text: str, case: str, phase: str) -> None:
    layout, victim_rank = (_CASES | _MORE)[case]
    job = make_job(**spec_of("dense", text, stop={"steps": 1000}, validation={"samples": 0}))
    group = job.workers(layout.world_size)
    for _ in range(_ROUNDS):
        victim = group[victim_rank]
        victim.strike(phase, 1, "hold", count=3)  # in the midst of the schedule
        job.start(group, layout=layout, restore_from=None)
        victim.reached()
        victim.kill()
        survivors = [worker for worker in group if worker is not victim]
        exits = job.interrupt(survivors)
        # a neighbour may have seen the connection break before it was interrupted
        assert {one.kind for one in exits} <= {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
        group[victim_rank] = job.workers(1)[0]
    generation = job.start(group, layout=layout, restore_from=None)
    group[0].call("request_yield", generation, True)
    assert [worker.exit().kind for worker in group] == [ExitKind.YIELDED] * len(group)
