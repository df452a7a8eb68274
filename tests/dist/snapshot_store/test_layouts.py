"""A snapshot of any layout loads into any other, bit for bit, locally and over TCP; uneven, empty."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_LAYOUTS = ("plain", "fsdp1", "fsdp2", "fsdp3", "fsdp4", "hsdp2x2", "fsdp2xtp2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def result(answer_of: Callable[..., dict[str, Any]], root: Path) -> dict[str, Any]:
    """What rank 0 of the four processes saw."""
    return answer_of("snapshot_layouts.py", root)


def test_state_is_bit_equal_after_resharding_between_all_pairs(result: dict[str, Any]) -> None:
    pairs = itertools.product(_LAYOUTS, _LAYOUTS)
    assert result["differing"] == {f"{saved}->{loaded}": [] for saved, loaded in pairs}


def test_parts_came_from_local_memory_and_over_the_network(result: dict[str, Any]) -> None:
    assert result["local"] > 0
    assert result["remote"] > 0


def test_no_file_is_left_when_all_stores_are_closed(result: dict[str, Any], root: Path) -> None:
    assert list(root.iterdir()) == []
