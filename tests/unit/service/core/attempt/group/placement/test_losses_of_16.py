"""Every layout of 16 workers on 4 nodes of 4, through losses of workers and nodes and through growth.

After each of them no tp group crosses nodes unless it has to, and survivors move only as far as that takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.cases import failed_cases
from kit.worlds.placements import layout_for, layouts_of_16, most_that_keep_their_rank, usual_order
from shoal_service.core.attempt.placement import Candidate, fewest_crossing, num_crossing, rank_order
from shoal_workers.contract.layout import Layout

NODES, PER_NODE = 4, 4
LAYOUTS = layouts_of_16()


@dataclass
class Cluster:
    """Workers come and go; `form` orders those that are there and checks the order."""

    wanted: Layout
    workers: list[Candidate] = field(default_factory=list)
    order: tuple[Candidate, ...] = ()
    layout: Layout = field(default_factory=Layout)
    num_started: int = 0

    def add(self, node: str, number: int) -> None:
        for _ in range(number):
            self.workers.append(Candidate(self.num_started, node, node))
            self.num_started += 1

    def lose(self, indexes: set[int]) -> None:
        self.workers = [worker for worker in self.workers if worker.index not in indexes]

    def lose_node(self, node: str) -> None:
        self.lose({worker.index for worker in self.workers if worker.node == node})

    def on_node(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for worker in self.workers:
            found.setdefault(worker.node, []).append(worker.index)
        return found

    def form(self) -> None:
        before, previous = [worker.index for worker in self.order], self.layout
        self.layout = layout_for(len(self.workers), self.wanted)
        usual = usual_order(self.workers, before)
        self.order = rank_order(usual, before, self.layout)
        assert len({worker.index for worker in self.order}) == self.layout.world_size
        crossing = num_crossing([worker.node for worker in self.order], self.layout.tp)
        assert crossing == fewest_crossing(self.workers, self.layout)
        if before and self.layout == previous and crossing == 0:
            kept = sum(index == worker.index for index, worker in zip(before, self.order, strict=True))
            assert kept == most_that_keep_their_rank(self.workers, before, self.layout)


def started(wanted: Layout, *, in_turn: bool = False) -> Cluster:
    """16 workers. `in_turn`: Ray has started them on the nodes in turn, otherwise node by node."""
    cluster = Cluster(wanted)
    for number in range(NODES * PER_NODE):
        cluster.add("ABCD"[number % NODES if in_turn else number // PER_NODE], 1)
    cluster.form()
    return cluster


def tp_groups_inside(cluster: Cluster) -> bool:
    return num_crossing([worker.node for worker in cluster.order], cluster.layout.tp) == 0


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_worker_a_node_and_growth_by_half_a_node(in_turn: bool) -> None:
    def check(wanted: Layout) -> None:
        lose_and_grow(started(wanted, in_turn=in_turn), wanted)

    assert failed_cases(check, LAYOUTS, Layout.describe) == {}


def lose_and_grow(cluster: Cluster, wanted: Layout) -> None:
    """With a larger tp than a node has workers, `form` checks that no more groups cross than have to."""
    fits = wanted.tp <= PER_NODE
    assert tp_groups_inside(cluster) is fits

    lost = cluster.order[5]
    cluster.lose({lost.index})
    cluster.form()
    cluster.add(lost.node, 1)
    cluster.form()
    assert tp_groups_inside(cluster) is fits

    cluster.lose_node(cluster.order[-1].node)
    cluster.form()
    assert tp_groups_inside(cluster) or not fits
    cluster.add("E", PER_NODE // 2)
    cluster.form()
    if wanted.tp <= PER_NODE // 2:
        assert tp_groups_inside(cluster)


@settings(max_examples=100)
@given(wanted=st.sampled_from(LAYOUTS), data=st.data())
def test_any_losses_and_growth(wanted: Layout, data: st.DataObject) -> None:
    cluster = started(wanted, in_turn=data.draw(st.booleans(), label="in turn"))
    for number in range(data.draw(st.integers(1, 5), label="changes")):
        on_node = cluster.on_node()
        match data.draw(st.sampled_from(["workers", "node", "replaced", "grow"]), label=f"change {number}"):
            case "workers":
                some = st.sets(st.sampled_from([w.index for w in cluster.workers]), min_size=1, max_size=3)
                lost = data.draw(some)
                if len(lost) < len(cluster.workers):
                    cluster.lose(lost)
            case "node" if len(on_node) > 1:
                cluster.lose_node(data.draw(st.sampled_from(sorted(on_node))))
            case "replaced":  # a new worker is on any node
                index = data.draw(st.sampled_from([w.index for w in cluster.workers]))
                cluster.add(data.draw(st.sampled_from([*sorted(on_node), f"N{number}"])), 1)
                cluster.lose({index})
            case _:
                cluster.add(f"N{number}", PER_NODE // 2)
        cluster.form()
