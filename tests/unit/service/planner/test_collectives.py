"""Seconds of collectives inside and between nodes of 4, by hand: 10 GB/s inside, 1 GB/s and 1 ms between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal_service.core.hardware_profile import Link
from shoal_service.planner.collectives import group, send_s


def _group(profile: Any, size: int, stride: int) -> Any:
    return group(profile, np.array([size]), np.array([stride]))


def test_a_group_of_one_takes_no_time(round_numbers: Any) -> None:
    alone = _group(round_numbers, 1, 8)
    assert alone.gather_s(np.array([1e9])) == alone.exchange_s(np.array([1e9])) == alone.reduce_s(np.array([1e9])) == 0


def test_inside_a_node(round_numbers: Any) -> None:
    inside = _group(round_numbers, 4, 1)
    assert inside.gather_s(np.array([1e9])) == pytest.approx(0.75 * 0.1)
    assert inside.reduce_s(np.array([1e9])) == pytest.approx(1.5 * 0.1)
    assert inside.exchange_s(np.array([1e9])) == pytest.approx(0.75 * 0.1)


def test_ranks_on_one_node_use_all_its_network_cards(round_numbers: Any) -> None:
    eight = _group(round_numbers, 8, 1)  # 4 ranks per node: 4 GB/s
    assert eight.gather_s(np.array([8e9])) == pytest.approx(7e9 / 4e9 + 1e-3)
    spread = _group(round_numbers, 8, 4)  # one rank per node: 1 GB/s
    assert spread.gather_s(np.array([8e9])) == pytest.approx(7e9 / 1e9 + 1e-3)


def test_an_exchange_waits_for_its_slower_link(round_numbers: Any) -> None:
    eight = _group(round_numbers, 8, 1)  # of 8 parts one stays, 3 go inside, 4 to the other node
    assert eight.exchange_s(np.array([8e9])) == pytest.approx(4e9 / 1e9 + 1e-3)


def test_a_message_to_the_next_node(round_numbers: Any) -> None:
    assert send_s(round_numbers, np.array([1e9]), np.array([1])) == pytest.approx(0.1)
    assert send_s(round_numbers, np.array([1e9]), np.array([4])) == pytest.approx(1.001)


def test_latency_grows_with_the_logarithm_of_the_group() -> None:
    link = Link(bandwidth=1.0, latency_s={2: 1.0, 8: 3.0})
    assert [link.latency(size) for size in (1, 2, 4, 8, 16)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])


def test_groups_that_share_processors_communicate_slower(round_numbers: Any) -> None:
    """8 ranks on 2 processors: 4 times slower; a latency was measured with the group's own ranks competing."""
    link = Link(bandwidth=1e9, latency_s={2: 1e-3, 8: 1e-2})
    crowded = round_numbers.model_copy(update={"inside": link, "ranks_per_node": 8, "processors_per_node": 2})
    sharing = np.array([crowded.sharing(8)])
    pair = group(crowded, np.array([2]), np.array([1]), sharing)
    assert pair.gather_s(np.array([1e9])) == pytest.approx(4 * 0.5 + 4 * 1e-3)
    everybody = group(crowded, np.array([8]), np.array([1]), sharing)
    assert everybody.gather_s(np.array([1e9])) == pytest.approx(4 * 0.875 + 1e-2)
