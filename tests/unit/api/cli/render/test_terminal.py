"""Curves and bars of block characters."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal_api.cli.render.terminal import Part, bar, shares, sparkline, worker_bar


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


@given(st.lists(st.floats(0, 1e12), max_size=12), st.integers(1, 100))
def test_shares_fill_the_width_and_every_part_is_visible_if_the_width_allows(amounts: list[float], width: int) -> None:
    blocks = shares(amounts, width)
    assert len(blocks) == len(amounts)
    assert sum(blocks) == (width if sum(amounts) > 0 else 0)
    assert all((block == 0) for block, amount in zip(blocks, amounts, strict=True) if amount == 0)
    if sum(1 for amount in amounts if amount > 0) <= width:
        assert all(block >= 1 for block, amount in zip(blocks, amounts, strict=True) if amount > 0)


def test_the_length_of_a_part_is_its_share() -> None:
    line = bar([Part("a", 3.0, "red"), Part("b", 0.0, "blue"), Part("c", 1.0, "green")], 8)
    assert line.plain == "█" * 8
    assert [(span.start, span.end, span.style) for span in line.spans if span.end > span.start] == [
        (0, 6, "red"),
        (6, 8, "green"),
    ]
