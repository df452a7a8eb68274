"""Ranks are dealt so that tp groups, then larger groups, stay inside nodes, and few survivors move."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.cases import failed_cases
from kit.worlds.placements import layouts_of_16, usual_order
from shoal_service.core.attempt.placement import Candidate, fewest_crossing, num_crossing, rank_order
from shoal_workers.contract.layout import Layout

Problem = tuple[list[Candidate], list[int], Layout]


def on_nodes(text: str) -> list[Candidate]:
    """`0A 1A 2B`: workers and their nodes, each node on its own machine."""
    return [Candidate(int(word[:-1]), word[-1], word[-1]) for word in text.split()]


def order_of(text: str, previous: str, layout: Layout) -> str:
    got = rank_order(on_nodes(text), [int(index) for index in previous.split()], layout)
    return " ".join(str(candidate.index) for candidate in got)


@st.composite
def problems(draw: st.DrawFn, *, whole_nodes: bool = False) -> Problem:
    """Candidates on nodes of any size, a former group of some of them and of lost workers, and a layout."""
    tp, ep, cp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    pp, replicas, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    layout = Layout(pp=pp, dp_replicate=replicas, dp_shard=ep * outer, cp=cp, tp=tp, ep=ep)
    world = layout.world_size
    sizes: list[int] = []
    while sum(sizes) < world:
        size = draw(st.integers(1, 9))
        sizes.append(size * tp if whole_nodes else size)
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    nodes = draw(st.permutations(nodes) | st.just(nodes))
    per_machine = draw(st.sampled_from([1, 2]))
    candidates = [Candidate(i, f"n{node}", f"m{node // per_machine}") for i, node in enumerate(nodes)]
    if draw(st.booleans()):
        return candidates, [], layout
    if draw(st.booleans()):
        former = [c.index for c in rank_order(candidates, [], layout)]
        lost = {former[rank] for rank in draw(st.sets(st.integers(0, world - 1), max_size=3))}
        lost_nodes = {c.node for c in candidates if c.index in lost} if whole_nodes else set()
        remaining = [c for c in candidates if c.index not in lost and c.node not in lost_nodes]
        if len(remaining) < tp:
            return candidates, former, layout
        candidates = remaining
        layout = layout if len(candidates) >= world else Layout(dp_shard=len(candidates) // tp, tp=tp)
    else:
        known = st.sampled_from([c.index for c in candidates])
        former = draw(st.lists(known | st.integers(1000, 1099), min_size=1, max_size=2 * world, unique=True))
    return usual_order(candidates, former), former, layout


@given(problems())
def test_each_rank_gets_another_candidate_and_equal_input_gives_an_equal_order(problem: Problem) -> None:
    candidates, previous, layout = problem
    order = rank_order(candidates, previous, layout)
    assert len(order) == layout.world_size
    assert len(set(order)) == len(order)
    assert set(order) <= set(candidates)
    assert rank_order(list(candidates), list(previous), layout) == order


@given(problems(whole_nodes=True))
def test_no_tp_group_crosses_nodes_that_hold_multiples_of_tp(problem: Problem) -> None:
    candidates, previous, layout = problem
    assert num_crossing([c.node for c in rank_order(candidates, previous, layout)], layout.tp) == 0


@given(problems())
def test_as_few_tp_groups_cross_nodes_as_any_order_allows(problem: Problem) -> None:
    candidates, previous, layout = problem
    nodes = [c.node for c in rank_order(candidates, previous, layout)]
    fits = sum(size // layout.tp for size in Counter(c.node for c in candidates).values())
    assert num_crossing(nodes, layout.tp) == max(0, layout.world_size // layout.tp - fits)


@given(problems())
def test_as_few_tp_groups_cross_machines_as_any_order_allows(problem: Problem) -> None:
    candidates, _, layout = problem
    machines = [c.machine for c in rank_order(candidates, [], layout)]
    fits = sum(size // layout.tp for size in Counter(c.machine for c in candidates).values())
    assert num_crossing(machines, layout.tp) == max(0, layout.world_size // layout.tp - fits)


@given(problems())
def test_in_a_first_group_as_few_context_groups_cross_nodes_as_any_order_allows(problem: Problem) -> None:
    candidates, _, layout = problem
    size = layout.cp * layout.tp
    nodes = [c.node for c in rank_order(candidates, [], layout)]
    fits = sum(count // size for count in Counter(c.node for c in candidates).values())
    if size > 1:
        assert num_crossing(nodes, size) == max(0, layout.world_size // size - fits)


@given(problems())
def test_the_usual_order_stays_when_that_alone_breaks_no_tp_group(problem: Problem) -> None:
    candidates, previous, layout = problem
    usual = candidates[: layout.world_size]
    survives = any(c.index in previous for c in candidates)
    order = rank_order(candidates, previous, layout)
    is_good = num_crossing([c.node for c in usual], layout.tp) == fewest_crossing(candidates, layout)
    if survives and is_good:
        assert list(order) == usual


@given(problems())
def test_a_tp_group_that_has_survived_on_one_node_keeps_its_ranks_or_moves_as_usual(problem: Problem) -> None:
    candidates, previous, layout = problem
    order = rank_order(candidates, previous, layout)
    if list(order) == candidates[: layout.world_size]:
        return
    by_index = {c.index: c for c in candidates}
    for first in range(0, min(len(previous), layout.world_size) // layout.tp * layout.tp, layout.tp):
        group = [by_index.get(index) for index in previous[first : first + layout.tp]]
        if None not in group and len({c.node for c in group if c is not None}) == 1:
            assert list(order[first : first + layout.tp]) == group


@given(problems())
def test_with_shards_alone_the_order_is_the_usual_one(problem: Problem) -> None:
    candidates, previous, layout = problem
    plain = Layout(dp_shard=layout.world_size)
    assert list(rank_order(candidates, previous, plain)) == candidates[: plain.world_size]


@pytest.mark.parametrize(
    ("workers", "previous", "expected"),
    [
        ("0A 1B 2A 3B", "", "0 2 1 3"),  # the first group is dealt node by node
        ("0A 1A 2B 3B", "0 1 2 3", "0 1 2 3"),
        ("0A 8B 2B 3B 9A", "0 1 2 3", "0 9 2 3"),  # the spare on the node of the survivor
        ("0A 8C 2B 3B 9C", "0 1 2 3", "8 9 2 3"),  # a survivor makes room for two spares
        ("0A 8C 2B 3B", "0 1 2 3", "0 8 2 3"),  # a group has to cross nodes
        ("0A 8B 1A 2A 9B", "0 7 1 2", "8 9 1 2"),  # a whole group before half a group
        ("2B 3B 4C 5C 8B 9D", "0 1 2 3 4 5", "2 3 4 5"),  # a group is lost, fewer ranks
    ],
)
def test_survivors_of_fsdp2_x_tp2_move_only_for_a_tp_group(workers: str, previous: str, expected: str) -> None:
    assert order_of(workers, previous, Layout(dp_shard=2, tp=2)) == expected


def test_pipelines_stay_on_a_node_before_data_ranks_do() -> None:
    nodes = "0A 1A 2A 3A 4B 5B 6B 7B"
    assert order_of(nodes, "", Layout(pp=2, dp_shard=2, tp=2)) == "0 1 4 5 2 3 6 7"
    assert order_of(nodes, "", Layout(dp_shard=2, cp=2, tp=2)) == "0 1 2 3 4 5 6 7"
    assert order_of(nodes, "", Layout(dp_shard=4, ep=2, tp=2)) == "0 1 2 3 4 5 6 7"
    assert order_of("0A 1B 2A 3B 4A 5B 6A 7B", "", Layout(dp_shard=4, ep=4, cp=2)) == "0 2 4 6 1 3 5 7"


def test_of_4_nodes_with_4_workers_each_only_groups_larger_than_a_node_cross() -> None:
    assert failed_cases(check_crossings, layouts_of_16(), Layout.describe) == {}


def check_crossings(layout: Layout) -> None:
    workers = [Candidate(i, "ABCD"[i % 4], "m") for i in range(16)]
    order = rank_order(workers, [], layout)
    nodes = [c.node for c in order]
    assert num_crossing(nodes, layout.tp) == (0 if layout.tp <= 4 else 16 // layout.tp)
    if layout.tp > 1 or layout.cp > 1 or layout.ep > 1:
        context = layout.tp * layout.cp
        assert num_crossing(nodes, context) == (0 if context <= 4 else 16 // context)
        stages: dict[int, set[str]] = {}
        for rank, node in enumerate(nodes):
            stages.setdefault(rank % (16 // layout.pp), set()).add(node)
        if context * layout.ep * layout.pp <= 4:
            assert all(len(found) == 1 for found in stages.values())


def test_after_a_node_and_half_a_node_the_other_tp_groups_stay() -> None:
    layout = Layout(dp_shard=3, tp=4)
    workers = [Candidate(i, "ABCD"[i // 4], "m") for i in range(16)]
    before = [c.index for c in rank_order(workers, [], Layout(dp_shard=4, tp=4))]
    after = rank_order([c for c in workers if c.node != "B"], before, layout)
    assert [c.node for c in after] == ["A"] * 4 + ["C"] * 4 + ["D"] * 4
    spares = [Candidate(16, "E", "m"), Candidate(17, "E", "m")]
    grown = rank_order([*after, *spares], [c.index for c in after], Layout(dp_shard=7, tp=2))
    assert grown == (*after, *spares)


def test_ten_thousand_workers_take_less_than_two_seconds() -> None:
    workers = [Candidate(i, f"n{i % 1250}", f"m{i % 1250}") for i in range(10_000)]
    start = time.process_time()
    order = rank_order(workers, [], Layout(pp=2, dp_shard=1250, tp=4))
    remaining = [c for c in order if c.node != "n3" and c.index != 17]
    after = rank_order(remaining, [c.index for c in order], Layout(dp_shard=2497, tp=4))
    assert time.process_time() - start < 2.0
    assert sum(old == new for old, new in zip(order, after, strict=False)) >= 9976, "all but the lost groups stay"


def test_on_a_node_ranks_follow_the_numbers_of_its_gpus() -> None:
    gpus = {0: 3, 1: 0, 2: 2, 3: 1}
    workers = [Candidate(index, "A", "A", slot=slot) for index, slot in gpus.items()]
    assert [c.slot for c in rank_order(workers, [], Layout(dp_shard=2, tp=2))] == [0, 1, 2, 3]


def test_a_survivor_keeps_its_rank_whatever_its_gpu() -> None:
    before = [Candidate(index, "A", "A", slot=index) for index in range(4)]
    spare = Candidate(9, "A", "A", slot=0)
    after = rank_order([spare, *before[1:]], [0, 1, 2, 3], Layout(dp_shard=2, tp=2))
    assert [c.index for c in after] == [9, 1, 2, 3]
