"""The small programs of docs/programs.md: two ranks train as a plain loop, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds import plain_reference
from kit.worlds.small_programs import REFUSED, SPEC, TRAINED, Row
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

STEPS: int = SPEC["stop"]["steps"]


@pytest.mark.cells(2, 6)
@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row.words[:40])
def test_a_program_trains_on_two_ranks_as_a_plain_loop(make_job: Any, row: Row) -> None:
    spec = {**SPEC, "task": row.task, **row.spec}
    job = make_job(**spec)
    workers = job.workers(2)
    ends = job.run(workers, layout=fully_sharded(2))
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 2, [end.error and end.error.traceback for end in ends]
    if row.whole:
        size = spec["batch"]["global_size"]
        spec |= {"batch": {"global_size": size, "micro_size": size}, "elasticity": {"max_workers": 1}}
    plain = plain_reference.losses(spec, STEPS)
    reports = list(job.reported(workers, StepReport))
    assert [one.step for one in reports] == list(range(1, STEPS + 1))
    for one in reports:
        loss, norm, _, metrics = plain[one.step]
        near = {"rel": row.tolerance, "abs": row.tolerance}
        assert (one.loss, one.grad_norm) == pytest.approx((loss, norm), **near), one.step
        assert one.metrics == pytest.approx(metrics, **near)


@pytest.mark.cells(2, 4)
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.words[:40])
def test_a_program_that_cannot_be_trained_is_refused_in_these_words(make_job: Any, row: Row) -> None:
    job = make_job(**{**SPEC, "task": row.task, **row.spec})
    (end,) = job.run(job.workers(1), layout=fully_sharded(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert row.refused in end.error.message
    assert not job.committed
