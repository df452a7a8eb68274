"""Collectives of small tensors that go to all ranks at once: the same results as around the ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def result(answer_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 of the four processes saw."""
    return answer_of("direct_collectives.py")


def test_parts_are_gathered_bit_for_bit(result: dict[str, Any]) -> None:
    assert result["gathered"]


def test_summands_are_added(result: dict[str, Any]) -> None:
    assert result["scattered"] < 1e-5


def test_a_sum_over_ranks_has_the_same_bits_on_all_of_them(result: dict[str, Any]) -> None:
    assert len(result["reduced"]) == 4
    assert max(result["reduced"].values()) < 1e-12
    assert all(result["equal"].values())
    assert result["infinite"] == ["inf", "4.0"]


def test_large_tensors_go_around_the_ring(result: dict[str, Any]) -> None:
    one, two = ["all-to-all"], ["all-to-all"] * 2
    assert list(result["calls"].values()) == [
        one,
        one,
        ["reduce-scatter"],
        ["all-gather"],
        one,
        ["reduce-scatter"],
        one,
        one,
        two,
        ["all-reduce"],
    ]
