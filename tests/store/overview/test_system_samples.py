"""System metrics: rows, means and columns, roll-ups on both databases, and what is kept."""

import math
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from shoal_service.core.system_metrics import LEVELS, MAX_BUCKETS, SystemMetric, SystemSample
from shoal_service.store import JobNotFound, Store, system_samples
from shoal_service.store.database import system_samples as table
from shoal_service.store.records import read_job_num
from shoal_service.store.system_samples import (
    SystemRow,
    by_rank,
    in_buckets,
    list_metrics,
    make_row,
    mean,
    pack,
    unpack,
)

AT = 1_000_000.0


def sample(number: int, *busy: float | None) -> SystemSample:
    return SystemSample(at=AT + 10.0 * number, generation=1 + number // 100, values={"busy": busy, "cpu_cores": busy})


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


def test_reports_that_are_sent_twice_are_stored_once(store: Store, job_id: str, attempt: Any) -> None:
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
        counted = select(table.c.width_s, func.count()).where(table.c.job_num == read_job_num(tx, job_id))
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


finite = st.floats(min_value=2.0**-40, max_value=2.0**90, width=32) | st.just(0.0)
signed = finite | finite.map(lambda value: -value)


def row(at: float, *busy: float | None, generation: int = 1, name: str = "busy") -> SystemRow:
    return make_row(SystemSample(at=at, generation=generation, values={name: busy}))


def test_means_leave_out_what_is_missing_and_keep_the_last_time() -> None:
    found = mean([row(1.0, 0.2), row(2.0, 0.4, None, None, generation=2), row(3.0, None, 0.6, generation=2)])
    assert (found.at, found.generation, by_rank([found], "busy")) == (3.0, 2, [(0.3,), (0.6,), (None,)])


def test_a_metric_that_some_rows_lack_has_the_mean_of_the_others() -> None:
    found = mean([row(1.0, 1.0), row(2.0, 3.0, name="data"), row(3.0, 2.0)])
    assert (by_rank([found], "busy"), by_rank([found], "data")) == ([(1.5,)], [(3.0,)])


def test_rows_of_one_bucket_become_one() -> None:
    found = in_buckets([row(11.0, 0.0), row(19.0, 1.0), row(20.0, 0.5)], 10.0)
    assert [(one.at, by_rank([one], "busy")) for one in found] == [(19.0, [(0.5,)]), (20.0, [(0.5,)])]
    assert in_buckets([], 10.0) == []


def test_what_is_not_finite_or_too_large_was_not_measured() -> None:
    found = row(1.0, math.inf, math.nan, 1e39, 1.0)
    assert by_rank([found], "busy") == [(None,), (None,), (None,), (1.0,)]
    assert by_rank([mean([found, row(2.0, 2.0, 2.0, 2.0, 2.0)])], "busy") == [(2.0,), (2.0,), (2.0,), (1.5,)]


def test_rows_with_other_numbers_of_ranks_stand_side_by_side() -> None:
    assert by_rank([row(1.0, 1.0), row(2.0, 2.0, 3.0), row(3.0, 4.0, name="data")], "busy") == [
        (1.0, 2.0, None),
        (None, 3.0, None),
    ]
    assert by_rank([], "busy") == [] and by_rank([row(1.0, 1.0)], "data") == []


@given(st.lists(signed, min_size=1, max_size=20))
def test_a_number_is_shown_as_the_decimal_of_seven_digits_that_is_closest(values: list[float]) -> None:
    assert by_rank([row(1.0, *values)], "busy") == [(float(format(value, ".7g")),) for value in values]


@given(st.dictionaries(st.sampled_from(["busy", "data", "cpu_cores"]), st.lists(signed | st.none(), max_size=20)))
def test_bytes_are_those_of_the_released_form_and_are_read_one_metric_at_a_time(
    values: dict[str, list[float | None]],
) -> None:
    given_row = make_row(SystemSample(at=1.0, generation=1, values={name: tuple(row) for name, row in values.items()}))
    data = pack(given_row)
    assert set(list_metrics(data)) == set(values)
    for name, column in given_row.columns.items():
        [(found, back)] = unpack(data, {name}).items()
        assert found == name and np.array_equal(back, column, equal_nan=True)
    raw = zlib.decompress(data)
    numbers = [math.nan if value is None else value for row in values.values() for value in row]
    assert raw.endswith(struct.pack(f"<{len(numbers)}f", *numbers))
    assert struct.unpack_from("<I", raw)[0] == len(raw) - 4 - 4 * len(numbers)


def test_a_row_that_was_written_by_the_first_release_with_such_metrics_is_read() -> None:
    header = b'{"busy":2,"data":1}'
    data = zlib.compress(struct.pack("<I", len(header)) + header + struct.pack("<3f", 0.5, math.nan, 0.1), 1)
    found = SystemRow(1.0, 1, unpack(data, "all"))
    assert (by_rank([found], "busy"), by_rank([found], "data")) == ([(0.5,), (None,)], [(0.1,)])


@pytest.mark.parametrize("num_rows", [1, 4])
def test_means_of_rows_from_bytes_can_be_packed_again(num_rows: int) -> None:
    stored = [pack(row(float(number), 0.25 * number, None)) for number in range(num_rows)]
    merged = mean([SystemRow(1.0, 1, unpack(data, "all")) for data in stored])
    assert by_rank([SystemRow(1.0, 1, unpack(pack(merged), "all"))], "busy") == [(0.125 * (num_rows - 1),), (None,)]
