"""Capacity traces in hours and in seconds, and what is wrong with one."""

from __future__ import annotations

import pytest

from shoal_service.core.scheduling.market import ClusterState
from shoal_service.simulator.capacity import AWAY, Capacity
from shoal_service.simulator.read_capacity import parse_capacity
from shoal_service.simulator.read_trace import TraceError


def test_hours_with_a_comment_as_header_and_two_lines_for_a_step() -> None:
    text = "# at_h,nodes  (nodes alive from this hour on)\n0.000,0\n0.5,0\n0.5,9\n1,9\n1,2\n2,2\n"
    assert parse_capacity(text, "spot.csv", 4) == Capacity(4, ((0.0, 0), (1800.0, 9), (3600.0, 2)))


def test_seconds_that_start_later_begin_without_nodes() -> None:
    assert parse_capacity("at_s,nodes\n10,3\n", "c.csv", 1) == Capacity(1, ((0.0, 0), (10.0, 3)))
    assert parse_capacity("at_s,nodes\n0,3\n", "c.csv", 1) == Capacity.constant(3, 1)


def test_lines_of_several_clusters_one_of_which_is_lost_for_a_while() -> None:
    text = "at_s,cluster,nodes\n0,west,2\n0,east,3\n10,west,away\n20,west,2\n20,east,3\n"
    capacity = parse_capacity(text, "c.csv", 4)
    west = ((0.0, 2), (10.0, AWAY), (20.0, 2))
    assert capacity == Capacity.of_clusters({"east": [(0.0, 3)], "west": west}, 4)
    assert capacity.steps == ((0.0, 5), (10.0, 3), (20.0, 5))
    assert capacity.workers_by_cluster(1) == {"east": 12, "west": 0}
    assert [node.cluster for node in capacity.nodes(0)] == ["east"] * 3 + ["west"] * 2
    assert capacity.states(1) == {"east": ClusterState.OPEN, "west": ClusterState.AWAY}
    assert capacity.worker_seconds(0, 30) == 4 * (3 * 30 + 2 * 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_s,cluster,nodes\n0,3\n", "line 2: '0,3' is not a time, the name of a cluster"),
        ("at_s,cluster,nodes\n0,West,3\n", "line 2: '0,West,3' is not a time, the name of a cluster"),
        ("at_s,nodes\n0,away\n", "line 2: '0,away' is not a time and a number of nodes"),
        ("0,1\n", "line 1: a line before this one must name the columns"),
        ("at_h,nodes\n0,1\nx,2\n", "line 3: 'x,2' is not a time and a number of nodes"),
        ("at_h,nodes\n0,1,2\n", "line 2: there are 3 columns in place of 2"),
        ("at_h,nodes\n0,1.5\n", "line 2: '0,1.5' needs a time and a whole number of nodes"),
        ("at_h,nodes\n-1,2\n", "line 2: '-1,2' needs a time"),
        ("at_h,nodes\n2,1\n1,2\n", "line 3: the time 1 is before that of the line above"),
        ("at_h,nodes\n", "has no lines"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_capacity(text, "c.csv", 1)
