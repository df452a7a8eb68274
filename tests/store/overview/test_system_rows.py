"""Rows of system metrics: means, bytes and columns, without a database."""

import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.system_metrics import SystemSample
from shoal_service.store.system_rows import SystemRow, by_rank, in_buckets, mean, metrics_of, pack, row_of, unpack

finite = st.floats(min_value=2.0**-40, max_value=2.0**90, width=32) | st.just(0.0)
signed = finite | finite.map(lambda value: -value)


def row(at: float, *busy: float | None, generation: int = 1, name: str = "busy") -> SystemRow:
    return row_of(SystemSample(at=at, generation=generation, values={name: busy}))


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
    given_row = row_of(SystemSample(at=1.0, generation=1, values={name: tuple(row) for name, row in values.items()}))
    data = pack(given_row)
    assert set(metrics_of(data)) == set(values)
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
