from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal_api.cli.render.sparkline import sparkline, worker_bar


def test_a_falling_series_gives_falling_blocks() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"


def test_many_values_are_averaged_into_the_width() -> None:
    assert sparkline([1.0] * 50 + [2.0] * 50, 2) == "▁█"


def test_values_that_are_not_finite_give_an_empty_line() -> None:
    assert sparkline([math.nan, math.inf], 10) == ""


@given(st.lists(st.floats()), st.integers(0, 50))
def test_any_values_fit_into_the_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_missing_workers_are_hollow_squares() -> None:
    assert worker_bar(3, 4) == "■■■□ 3/4"
    assert worker_bar(60, 64) == "60/64"
