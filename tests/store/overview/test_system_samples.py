"""System metrics on both databases: roll-ups, what is kept, and what is read."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, select

from shoal_service.core.system_metrics import LEVELS, MAX_BUCKETS, SystemMetric, SystemSample
from shoal_service.store import JobNotFound, Store, system_samples
from shoal_service.store.records import num_of
from shoal_service.store.tables import system_samples as table

AT = 1_000_000.0


def sample(number: int, *busy: float | None) -> SystemSample:
    return SystemSample(at=AT + 10.0 * number, generation=1 + number // 100, values={"busy": busy, "cpu_cores": busy})


@pytest.fixture
def job_id(submit: Callable[..., str]) -> str:
    return submit()


def test_samples_are_read_by_rank_with_the_metrics_that_there_are(
    store: Store, job_id: str, begin: Callable[..., Any]
) -> None:
    begin(job_id).report(system=(sample(0, 0.5, 1.0), sample(1, 0.25, None), sample(2, 0.75, 1.0, 0.125)))
    found = store.reading(system_samples.read)(job_id, SystemMetric.BUSY)
    assert found.values == ((0.5, 0.25, 0.75), (1.0, None, 1.0), (None, None, 0.125))
    assert (found.at, found.ranks, found.width_s) == ((AT, AT + 10, AT + 20), (0, 1, 2), 10.0)
    assert found.metrics == (SystemMetric.BUSY, SystemMetric.CPU_CORES)
    some = store.reading(system_samples.read)(job_id, SystemMetric.CPU_CORES, ranks={1, 9}, after=AT)
    assert (some.ranks, some.values) == ((1,), ((None, 1.0),))
    absent = store.reading(system_samples.read)(job_id, SystemMetric.GPU_WATTS)
    assert absent.values == () and absent.metrics == found.metrics


def test_reports_that_are_sent_twice_are_stored_once(store: Store, job_id: str, begin: Callable[..., Any]) -> None:
    attempt = begin(job_id)
    attempt.report(system=(sample(0, 0.5),))
    attempt.repeat(system=(sample(0, 0.75),))
    assert store.reading(system_samples.read)(job_id, SystemMetric.BUSY).values == ((0.5,),)


def test_a_job_without_samples_has_none_and_an_unknown_one_is_refused(store: Store, job_id: str) -> None:
    assert store.reading(system_samples.read)(job_id, SystemMetric.BUSY).at == ()
    with pytest.raises(JobNotFound):
        store.reading(system_samples.read)("none", SystemMetric.BUSY)


def test_a_long_job_has_few_rows_and_its_roll_ups_are_the_means_of_its_samples(
    store: Store, job_id: str, begin: Callable[..., Any]
) -> None:
    attempt, draw, num_samples, at_once = begin(job_id), random.Random(7), 5_000, 45
    every = [sample(number, draw.random()) for number in range(num_samples)]
    for first in range(0, num_samples, at_once):  # a report ends in the middle of a bucket
        attempt.report(system=tuple(every[first : first + at_once]))

    found = store.reading(system_samples.read)(job_id, SystemMetric.BUSY)
    assert found.width_s == 640.0 and len(found.at) <= MAX_BUCKETS and found.at[-1] == every[-1].at
    for begin_at in (AT // 640 * 640 + 640, AT // 640 * 640 + 6400):
        expected = [one.values["busy"][0] or 0.0 for one in every if begin_at <= one.at < begin_at + 640]
        at = next(index for index, at in enumerate(found.at) if begin_at <= at < begin_at + 640)
        assert found.values[0][at] == pytest.approx(sum(expected) / len(expected), rel=1e-3)

    newest = store.reading(system_samples.read)(job_id, SystemMetric.BUSY, after=every[-101].at)
    assert newest.width_s == 10.0 and len(newest.at) == 100
    assert newest.values[0] == pytest.approx([one.values["busy"][0] for one in every[-100:]], rel=1e-4)

    with store.read() as tx:
        counted = select(table.c.width_s, func.count()).where(table.c.job_num == num_of(tx, job_id))
        rows = {row[0]: row[1] for row in tx.execute(counted.group_by(table.c.width_s))}
    assert set(rows) <= {int(width) for width in LEVELS} and max(rows.values()) == MAX_BUCKETS


def test_a_job_with_a_thousand_ranks_takes_little_room(store: Store, job_id: str, begin: Callable[..., Any]) -> None:
    draw = random.Random(3)
    values = {metric.value: tuple(draw.random() for _ in range(1024)) for metric in SystemMetric}
    begin(job_id).report(system=(SystemSample(at=AT, generation=1, values=values),))
    with store.read() as tx:
        [size] = tx.execute(select(func.length(table.c.data))).scalars()
    assert size < 4.5 * 1024 * len(SystemMetric)
    found = store.reading(system_samples.read)(job_id, SystemMetric.WRITTEN_BYTES_S)
    assert [row[0] for row in found.values] == pytest.approx(values["written_bytes_s"], rel=1e-4)
