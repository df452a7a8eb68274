"""The candidates are all legal layouts, each once; pipelines are cut so that the slowest stage is fast."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.planner.candidates import CONTEXTS, LEVELS, RECOMPUTES, SCHEDULES, Limits, balanced, candidates, cut
from shoal_service.planner.shape import shape_of
from shoal_workers.contract.checks.legality import legal_degrees, violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import (
    ContextMethod,
    Layout,
    ParallelismSpec,
    Recompute,
    Schedule,
    ShardLevel,
    micro_batches_fed,
    plain,
)
from shoal_workers.contract.proofs import is_refused
from shoal_workers.contract.spec import JobSpec, plan_of


def _spec(experts: int = 0, layers: int = 4, micro_batches: int = 8) -> JobSpec:
    return parse_spec(
        {
            "stop": {"steps": 1},
            "data": {"corpus": "python-stdlib"},
            "model": {"num_experts": experts, "num_layers": layers, "num_heads": 8, "num_kv_heads": 4},
            "batch": {"global_size": micro_batches, "micro_size": 1},
        }
    )


def _all(spec: JobSpec, world: int, fixed: ParallelismSpec | None = None) -> Any:
    shape, plan = shape_of(spec), plan_of(spec)
    assert shape is not None
    limits = Limits(legal_degrees(spec, plan), spec.batch.num_micro_batches, 8, fixed)
    return candidates(shape, limits, [world])


@given(st.integers(1, 64), st.sampled_from([0, 6, 8]), st.integers(1, 9), st.integers(1, 20))
def test_each_layout_is_legal_and_fills_its_world(world: int, experts: int, layers: int, micro_batches: int) -> None:
    spec = _spec(experts, layers, micro_batches)
    table = _all(spec, world)
    for place in {*range(0, len(table), max(1, len(table) // 40))}:
        layout = table.layout(place)
        assert layout.world_size == world
        assert violations(layout, spec, plan_of(spec)) == ()
        assert micro_batches_fed(layout, micro_batches) == table.fed[place]


@pytest.mark.parametrize(
    "refused",
    [
        Layout(tp=2),
        Layout(pp=2, tp=2),
        Layout(pp=2),
        Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V),
        Layout(cp=2),
        Layout(cp=2, context=ContextMethod.ULYSSES),
        Layout(dp_shard=2, ep=2),
    ],
)
def test_layouts_that_use_all_that_a_refused_one_uses_are_left_out_and_no_others(refused: Layout) -> None:
    spec = _spec(8)
    shape, features = shape_of(spec), (refused.features,)
    assert shape is not None
    limits = Limits(legal_degrees(spec, plan_of(spec)), spec.batch.num_micro_batches, 8, refused=features)
    table = candidates(shape, limits, [8])
    layouts = {table.layout(place) for place in range(len(table))}
    everything = _all(spec, 8)
    assert (
        layouts == {layout for layout in _rows(everything) if not is_refused(layout, (refused,))} != _rows(everything)
    )


def test_plain_replicas_that_were_refused_are_left_out_and_nothing_else() -> None:
    spec = _spec(8)
    shape = shape_of(spec)
    assert shape is not None
    limits = Limits(legal_degrees(spec, plan_of(spec)), spec.batch.num_micro_batches, 8, may_be_plain=True)
    every = candidates(shape, limits, [8])
    table = candidates(shape, replace(limits, refused=(plain(2).features,)), [8])
    assert plain(8) in _rows(every)
    assert _rows(table) == {layout for layout in _rows(every) if layout.shard is not ShardLevel.NONE}


def _rows(table: Any) -> set[Layout]:
    return {table.layout(place) for place in range(len(table))}


def test_no_layout_occurs_twice() -> None:
    table = _all(_spec(8), 16)
    layouts = [table.layout(place) for place in range(len(table))]
    assert len(set(layouts)) == len(layouts) > 100


def test_a_product_of_all_five_axes_is_there() -> None:
    table = _all(_spec(8), 32)
    five = (table.pp > 1) & (table.dp_replicate > 1) & (table.dp_shard > 1) & (table.cp > 1) & (table.tp > 1)
    assert np.any(five & (table.ep > 1))
    for values, column in ((SCHEDULES, table.schedule), (RECOMPUTES, table.recompute), (CONTEXTS, table.context)):
        assert set(column) == set(range(len(values)))
    assert set(table.level) == set(range(len(LEVELS))) - {LEVELS.index(ShardLevel.NONE)}


def test_an_ep_over_tp_and_cp_ranks_is_listed_only_for_another_program() -> None:
    spec = _spec(8)
    shape, degrees = shape_of(spec), legal_degrees(spec, plan_of(spec))
    assert shape is not None
    limits = Limits(degrees, spec.batch.num_micro_batches, 8, folds_experts=True)
    table, legal = candidates(shape, limits, [8]), _all(spec, 8)
    assert not legal.folds_experts.any()
    folded = {layout for layout in _rows(table) if layout.dp_shard % layout.ep}
    assert {(layout.tp, layout.cp, layout.dp_shard, layout.ep) for layout in folded} >= {(4, 1, 2, 8), (2, 2, 2, 8)}
    assert _rows(table) - folded == _rows(legal)


def test_choices_without_effect_are_not_varied() -> None:
    table = _all(_spec(), 4)
    assert set(table.schedule[table.pp == 1]) == {SCHEDULES.index(Schedule.ONE_F_ONE_B)}
    assert set(table.context[table.cp == 1]) == {CONTEXTS.index(ContextMethod.ALL_GATHER)}
    assert set(table.level[(table.shards == 1) | (table.pp > 1)]) == {LEVELS.index(ShardLevel.OPTIMIZER)}


def test_fixed_choices_are_kept() -> None:
    fixed = ParallelismSpec(
        pp=2,
        tp=2,
        schedule=Schedule.GPIPE,
        shard=ShardLevel.FULL,
        recompute=Recompute.FULL,
        context=ContextMethod.ULYSSES,
    )
    table = _all(_spec(), 8, fixed)
    assert len(table) == 1
    layout = table.layout(0)
    assert (layout.pp, layout.tp, layout.dp_shard, layout.dp_replicate) == (2, 2, 2, 1)
    assert (layout.schedule, layout.shard, layout.recompute) == (Schedule.GPIPE, ShardLevel.FULL, Recompute.FULL)


def test_a_world_that_the_fixed_degrees_do_not_fit_has_none() -> None:
    assert len(_all(_spec(), 6, ParallelismSpec(tp=4))) == 0


def test_a_head_that_costs_as_much_as_a_block_counts_as_a_block() -> None:
    assert balanced([1.0] * 80, 16, 1.1) == (5,) * 14 + (6, 4)
    assert balanced([1.0] * 8, 4) == (2, 2, 2, 2)


@given(
    st.lists(st.sampled_from([0.3, 1.0, 2.2]), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_no_other_cut_has_a_cheaper_slowest_stage(costs: list[float], num_stages: int, extra: float) -> None:
    num_stages = min(num_stages, len(costs))
    sizes = balanced(costs, num_stages, extra)
    assert sum(sizes) == len(costs) and min(sizes) >= 1 and len(sizes) == num_stages
    ends = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)]
    assert _slowest(costs, sizes, extra) <= min(
        _slowest(costs, tuple(b - a for a, b in pairwise(end)), extra) for end in ends
    ) * (1 + 1e-5)


def _slowest(costs: list[float], sizes: tuple[int, ...], extra: float) -> float:
    start, most = 0, 0.0
    for place, size in enumerate(sizes):
        most = max(most, sum(costs[start : start + size]) + (extra if place == len(sizes) - 1 else 0.0))
        start += size
    return most


def test_in_a_v_the_first_rank_has_both_ends(job: Any) -> None:
    shape = shape_of(job({"num_layers": 8}))
    assert shape is not None
    v, straight = cut(shape, 2, 2, is_v_shaped=True), cut(shape, 2, 1, is_v_shaped=False)
    first, _, last = v.extremes
    assert (first.has_embedding, first.has_head, last.has_head) == (True, True, False)
    first, _, last = straight.extremes
    assert (first.has_embedding, first.has_head, last.has_head) == (True, False, True)
    assert sum(v.stages) == sum(straight.stages) == 8
