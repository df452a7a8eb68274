"""Curves of cache jobs: few points from the roll-ups, with exact ends, which are read again after a change."""

import base64
import math
from array import array
from typing import Any

import pytest

from kit.views import series_point
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.reports import SupervisorReports
from shoal_service.store import Store, driving, reporting, submissions
from shoal_service.store.job_lists import FleetQuery
from shoal_service.store.many_curves import CurveCache, CurveQuery, is_metric
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

AT = 1_700_000_000.0


def point(step: int, loss: float) -> SeriesPoint:
    own = {"accuracy": step / 1e4} if step % 2 else {}
    return series_point(step, at=AT + step, loss=loss, lr=1e-3, tokens_per_s=100, world_size=4, metrics=own)


class Writer:
    """Plays the supervisor of one job."""

    def __init__(self, store: Store, spec: JobSpec) -> None:
        lease = store.acquire_lease("test", ttl_s=1e9, now=AT)
        assert lease is not None
        self.store, self.epoch, self.seq = store, lease.epoch, 0
        self.id = store.writing(submissions.create)(spec, idempotency_key=None, now=AT)[0].id
        store.writing(driving.begin_attempt, self.epoch)(self.id, workers=4, now=AT)

    def report(self, first: int, last: int) -> None:
        self.seq += 1
        points = tuple(point(step, math.nan if step == 3 else 1 / step) for step in range(first, last + 1))
        status = JobStatus(state=JobState.RUNNING, attempt=1, generation=1, step=last, tokens=last * 10)
        reports = SupervisorReports(attempt=1, seq=self.seq, status=status, series=points)
        self.store.writing(reporting.apply, self.epoch)(self.id, reports, now=AT + self.seq)


@pytest.fixture
def writer(store: Store, spec: JobSpec) -> Writer:
    return Writer(store, spec)


def read(store: Store, cache: CurveCache, query: CurveQuery, **more: Any) -> Any:
    with store.read() as tx:
        return cache.read(tx, FleetQuery(limit=500), query, **more)


def test_a_short_curve_has_every_step_and_a_long_one_means(store: Store, writer: Writer) -> None:
    cache, query = CurveCache(), CurveQuery(metrics=("loss", "metric.accuracy", "val_loss"), min_points=60)
    writer.report(1, 100)
    [job] = read(store, cache, query)[0]
    assert job.curve.step == tuple(range(1, 101)) and job.curve.at[4] == AT + 5
    assert job.curve.values["loss"][1:4] == (1 / 2, None, 1 / 4), "what is not finite is null"
    assert job.curve.values["metric.accuracy"][:3] == (1e-4, None, 3e-4)
    assert "val_loss" not in job.curve.values and job.tokens_per_step == 10

    writer.report(101, 5003)
    [job] = read(store, cache, query)[0]
    expected = [*range(64, 4993, 64), 5000, 5001, 5002, 5003]
    assert list(job.curve.step) == expected and 60 <= len(expected) <= 8 * 60 + 24
    mean = sum(1 / step for step in range(65, 129)) / 64
    assert job.curve.values["loss"][1] == pytest.approx(mean)
    assert job.curve.values["loss"][-1] == 1 / 5003, "the newest step is exact"

    part = CurveQuery(metrics=("loss",), min_points=60, after_step=1000, until_step=1100)
    [job] = read(store, cache, part)[0]
    assert job.curve.step == tuple(range(1001, 1101))


def test_packed_columns_are_the_same_numbers(store: Store, writer: Writer) -> None:
    writer.report(1, 50)
    cache = CurveCache()
    [plain] = read(store, cache, CurveQuery(metrics=("loss",)))[0]
    [packed] = read(store, cache, CurveQuery(metrics=("loss",), packed=True))[0]
    assert tuple(array("d", base64.b64decode(packed.curve.step))) == plain.curve.step
    losses = array("f", base64.b64decode(packed.curve.values["loss"]))
    assert math.isnan(losses[2]) and losses[3] == pytest.approx(0.25)


def test_only_jobs_that_have_changed_are_read_again(store: Store, writer: Writer, spec: JobSpec) -> None:
    other = Writer(store, spec)
    cache, query = CurveCache(), CurveQuery(metrics=("loss",))
    writer.report(1, 10)
    other.report(1, 10)
    first, versions = read(store, cache, query)
    assert list(versions) == [other.id, writer.id], "the newest first"
    again, _ = read(store, cache, query)
    assert all(job.curve is before.curve for job, before in zip(again, first, strict=True)), "they are kept"
    writer.report(11, 12)
    [job], _ = read(store, cache, query, known=versions)
    assert job.id == writer.id and job.curve.step[-1] == 12


def test_names_of_metrics_are_those_of_conditions() -> None:
    assert all(map(is_metric, ("loss", "world_size", "metric.accuracy", "val.bleu/en")))
    assert not any(map(is_metric, ("", "los", "metric.", "metrics.accuracy", "status")))
