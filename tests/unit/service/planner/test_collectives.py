"""Seconds of collectives inside and between nodes of 4, by hand: 10 GB/s inside, 1 GB/s and 1 ms between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal_service.core.hardware_profile import Link, LinkClass
from shoal_service.planner.collectives import LINK_CLASSES, Span, group, send_s


def _span(size: int, per_node: int | None = None, per_rack: int | None = None) -> Span:
    """A group inside a node, on several nodes of a rack, or in several racks."""
    link = LinkClass.INSIDE_NODE if per_node is None else LinkClass.BETWEEN_NODES
    numbers = size, LINK_CLASSES.index(link if per_rack is None else LinkClass.BETWEEN_RACKS), per_node, per_rack
    return Span(*(np.array([number if number is not None else size]) for number in numbers))


def _group(profile: Any, *places: int) -> Any:
    return group(profile, _span(*places))


def test_a_group_of_one_takes_no_time(round_numbers: Any) -> None:
    alone = _group(round_numbers, 1)
    assert alone.gather_s(np.array([1e9])) == alone.exchange_s(np.array([1e9])) == alone.reduce_s(np.array([1e9])) == 0


def test_inside_a_node(round_numbers: Any) -> None:
    inside = _group(round_numbers, 4)
    assert inside.gather_s(np.array([1e9])) == pytest.approx(0.75 * 0.1)
    assert inside.reduce_s(np.array([1e9])) == pytest.approx(1.5 * 0.1)
    assert inside.exchange_s(np.array([1e9])) == pytest.approx(0.75 * 0.1)


def test_ranks_on_one_node_use_all_its_network_cards(round_numbers: Any) -> None:
    eight = _group(round_numbers, 8, 4)  # 4 ranks per node: 4 GB/s
    assert eight.gather_s(np.array([8e9])) == pytest.approx(7e9 / 4e9 + 1e-3)
    spread = _group(round_numbers, 8, 1)  # one rank per node: 1 GB/s
    assert spread.gather_s(np.array([8e9])) == pytest.approx(7e9 / 1e9 + 1e-3)


def test_an_exchange_waits_for_its_slower_link(round_numbers: Any) -> None:
    eight = _group(round_numbers, 8, 4)  # of 8 parts one stays, 3 go inside, 4 to the other node
    assert eight.exchange_s(np.array([8e9])) == pytest.approx(4e9 / 1e9 + 1e-3)


def test_a_message_to_the_next_node(round_numbers: Any) -> None:
    seconds = send_s(round_numbers, np.full(3, 1e9), np.arange(3))
    assert seconds == pytest.approx([0.1, 1.001, 2.001])


def test_a_ring_over_racks_has_the_uplinks_of_its_ranks_in_one_rack(round_numbers: Any) -> None:
    """By default a rank has half of the bandwidth of its network cards between racks: 0.5 GB/s."""
    two_of_four = _group(round_numbers, 8, 2, 4)
    assert two_of_four.gather_s(np.array([8e9])) == pytest.approx(7e9 / 2e9 + 1e-3)
    one_of_two = _group(round_numbers, 8, 2, 2)
    assert one_of_two.gather_s(np.array([8e9])) == pytest.approx(7e9 / 1e9 + 1e-3)
    assert two_of_four.exchange_s(np.array([8e9])) == pytest.approx(4e9 / 0.5e9 + 1e-3)


def test_the_links_between_racks_can_be_set(round_numbers: Any) -> None:
    slow = round_numbers.model_copy(update={"between_racks": Link(bandwidth=1e8, latency_s={1: 0.5})})
    assert _group(slow, 2, 1, 1).gather_s(np.array([1e9])) == pytest.approx(0.5 * 1e9 / 1e8 + 0.5)
    assert _group(slow, 2, 1).gather_s(np.array([1e9])) == pytest.approx(0.5 * 1e9 / 1e9 + 1e-3)


def test_latency_grows_with_the_logarithm_of_the_group() -> None:
    link = Link(bandwidth=1.0, latency_s={2: 1.0, 8: 3.0})
    assert [link.latency(size) for size in (1, 2, 4, 8, 16)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])


def test_groups_that_share_processors_communicate_slower(round_numbers: Any) -> None:
    """8 ranks on 2 processors: 4 times slower; a latency was measured with the group's own ranks competing."""
    link = Link(bandwidth=1e9, latency_s={2: 1e-3, 8: 1e-2})
    crowded = round_numbers.model_copy(update={"inside": link, "ranks_per_node": 8, "processors_per_node": 2})
    sharing = np.array([crowded.sharing(8)])
    pair = group(crowded, _span(2), sharing)
    assert pair.gather_s(np.array([1e9])) == pytest.approx(4 * 0.5 + 4 * 1e-3)
    everybody = group(crowded, _span(8), sharing)
    assert everybody.gather_s(np.array([1e9])) == pytest.approx(4 * 0.875 + 1e-2)
