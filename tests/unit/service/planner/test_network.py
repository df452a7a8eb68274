"""Which links the groups of each axis cross, seconds of collectives, and layouts that fit the nodes of the workers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.worlds.placements import layouts_of_16
from shoal_service.core.attempt.placement import Candidate, rank_order
from shoal_service.core.hardware_profile import HardwareProfile, Link, LinkClass, Racks
from shoal_service.planner import Prediction, plan, rank
from shoal_service.planner.candidates import Candidates
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.network import LINK_CLASSES, Span, group, network, send_s
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout

CLASSES = INSIDE, NODES, RACKS = LinkClass.INSIDE_NODE, LinkClass.BETWEEN_NODES, LinkClass.BETWEEN_RACKS
H100 = PROFILES["h100"]
WORLDS: list[Racks] = [
    ((16,),),
    ((8, 8),),
    ((4, 4, 4, 4),),
    ((4, 4), (4, 4)),
    ((2,) * 8,),
    ((2, 2, 2, 2), (2, 2, 2, 2)),
    ((1,) * 16,),
    ((8,), (4, 4)),
    ((3, 5), (8,)),
    ((3, 5, 8),),
]
"""16 workers each."""


def predicted(layout: Layout, racks: Racks, profile: HardwareProfile) -> dict[str, LinkClass]:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    others = ("level", "schedule", "per_rank", "recompute", "context", "cut", "fed")
    degrees: dict[str, Any] = {name: np.array([getattr(layout, name)]) for name in names}
    columns = Candidates(**degrees, **dict.fromkeys(others, np.array([1])), cuts=())
    return network(columns, profile, racks).spans.classes(0)


def workers_on(racks: Racks) -> list[Candidate]:
    """Started on the nodes in turn, as Ray may do it."""
    places = [(f"r{r}", f"r{r}n{n}", size) for r, rack in enumerate(racks) for n, size in enumerate(rack)]
    turns = [(turn, rack, node) for rack, node, size in places for turn in range(size)]
    return [Candidate(i, node, node, rack) for i, (_, rack, node) in enumerate(sorted(turns))]


def real(layout: Layout, racks: Racks) -> dict[str, LinkClass]:
    order = rank_order(workers_on(racks), [], layout)
    return {
        axis: max((_crossed(order, group) for group in groups), key=CLASSES.index) for axis, groups in _groups(layout)
    }


def _crossed(order: Sequence[Candidate], ranks: Sequence[int]) -> LinkClass:
    if len({order[rank].rack for rank in ranks}) > 1:
        return RACKS
    return NODES if len({order[rank].node for rank in ranks}) > 1 else INSIDE


def _groups(layout: Layout) -> Iterator[tuple[str, list[list[int]]]]:
    """The ranks of each group of each axis with more than one rank."""
    shape = (layout.pp, layout.dp_replicate, layout.dp_shard // layout.ep, layout.ep, layout.cp, layout.tp)
    ranks = np.arange(layout.world_size).reshape(shape)
    axes = {"pp": (0,), "dp_replicate": (1,), "dp_shard": (2, 3, 4), "ep": (3,), "cp": (4,), "tp": (5,)}
    for axis, dims in axes.items():
        size = int(np.prod([shape[dim] for dim in dims]))
        if size > 1:
            rest = [dim for dim in range(6) if dim not in dims]
            yield axis, ranks.transpose(*rest, *dims).reshape(-1, size).tolist()


@pytest.mark.parametrize("racks", WORLDS, ids=str)
def test_the_classes_are_those_of_the_real_order(racks: Racks) -> None:
    for layout in layouts_of_16():
        assert predicted(layout, racks, H100) == real(layout, racks), layout.describe()


def test_on_one_node_no_axis_leaves_it() -> None:
    for layout in layouts_of_16():
        assert set(predicted(layout, ((16,),), H100).values()) <= {INSIDE}


def test_without_known_nodes_the_profile_says_their_size() -> None:
    for layout in layouts_of_16():
        assert predicted(layout, (), H100) == predicted(layout, ((8, 8),), H100)


def test_an_ep_over_tp_ranks_stays_in_a_node_if_it_has_room() -> None:
    inside = predicted(Layout(tp=4, dp_shard=4, ep=8), (), H100)
    assert (inside["ep"], inside["dp_shard"]) == (INSIDE, LinkClass.BETWEEN_NODES)
    assert predicted(Layout(tp=4, dp_shard=8, ep=32), (), H100)["ep"] is LinkClass.BETWEEN_NODES


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
)
def test_no_class_is_faster_than_the_real_one_if_all_workers_train(
    sizes: list[list[int]], degrees: tuple[int, int, int, int]
) -> None:
    (tp, cp, pp, ep), workers = degrees, sum(map(sum, sizes))
    unit = tp * cp * pp * ep
    if workers % unit == 0:
        layout, racks = Layout(tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=workers // unit * ep), tuple(map(tuple, sizes))
        found = real(layout, racks)
        for axis, link in predicted(layout, racks, H100).items():
            assert CLASSES.index(link) >= CLASSES.index(found[axis]), axis


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


LARGE: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "stop": {"steps": 1},
    "model": {"dim": 8192, "num_layers": 16, "num_heads": 16, "seq_len": 2048},
    "batch": {"global_size": 2, "micro_size": 1},
    "worker": {"gpus": 1},
}
DEEP: dict[str, Any] = {
    **LARGE,
    "model": {"dim": 4096, "num_layers": 32, "num_heads": 32, "seq_len": 4096},
    "batch": {"global_size": 16, "micro_size": 1},
}
WIDE = {
    **LARGE,
    "model": {"dim": 32_768, "num_layers": 1, "num_heads": 64, "seq_len": 2048},
    "batch": {"global_size": 1, "micro_size": 1},
}


def test_whole_nodes_and_unknown_nodes_give_the_same_plan() -> None:
    spec = parse_spec(LARGE)
    assert plan(spec, 16, None, ((8, 8),)) is plan(spec, 16)


def test_the_axes_beside_tp_are_compared_with_the_links_that_they_cross() -> None:
    spec = parse_spec(LARGE)
    layouts = {
        nodes: plan(spec, 8, None, (nodes,)).layout.describe() for nodes in [(8,), (4, 4), (2, 2, 2, 2), (1,) * 8]
    }
    assert layouts == {(8,): "fsdp2 x tp4", (4, 4): "pp2 x tp4", (2, 2, 2, 2): "pp4 x tp2", (1,) * 8: "pp8"}


@pytest.mark.parametrize(
    ("racks", "of_large", "of_deep"),
    [
        (((16,),), "pp2 x fsdp2 x tp4", "fsdp16"),
        (((8, 8),), "pp2 x cp2 x tp4", "fsdp16"),
        (((4, 4, 4, 4),), "pp4 x tp4", "fsdp16"),
        (((1,) * 16,), "pp8 x fsdp2", "pp8 x fsdp2"),
        (((1,) * 8, (1,) * 8), "pp8 x cp2", "pp4 x fsdp4"),
    ],
)
def test_16_workers_get_the_layout_for_their_nodes_and_racks(racks: Racks, of_large: str, of_deep: str) -> None:
    """The axes that communicate most stay inside nodes. Over racks, each with one of two halves of a pipeline, sums of
    gradients cost less than the longer pipeline."""
    assert [_fastest(document, 16, racks) for document in (LARGE, DEEP)] == [of_large, of_deep]


def _fastest(document: dict[str, Any], workers: int, racks: Racks) -> str:
    """The layout with the shortest step; a plan may take a simpler one that is almost as fast."""
    predictions = rank(parse_spec(document), workers, None, 100, racks).predictions
    return min((p for p in predictions if p.fits), key=lambda p: p.step_s).name


def test_of_uneven_nodes_the_smallest_piece_of_a_group_counts() -> None:
    assert [plan(parse_spec(DEEP), 8, None, racks).layout.describe() for racks in (((8,),), ((3, 5),))] == ["fsdp8"] * 2
    assert _fastest(DEEP, 8, ((3,), (5,))) == "pp8"
    steps = [
        rank(parse_spec(DEEP), 8, None, 1, racks).predictions[0].step_s for racks in (((8,),), ((4, 4),), ((3, 5),))
    ]
    assert steps == sorted(steps)


def test_on_one_node_every_plan_is_that_of_unknown_nodes() -> None:
    for document in (LARGE, DEEP, WIDE):
        spec = parse_spec(document)
        for world in range(1, 9):
            known, unknown = plan(spec, world, None, ((world,),)), plan(spec, world)
            assert (known.layout, known.rank_bytes) == (unknown.layout, unknown.rank_bytes)


def test_a_fixed_tp_is_used_although_it_crosses_nodes() -> None:
    spec = parse_spec({**LARGE, "parallelism": {"tp": 8}, "elasticity": {"max_workers": 8}})
    planned = plan(spec, 8, None, ((4, 4),))
    assert planned.layout.tp == 8 and "tp 8 between nodes, " in planned.reason
    inside = plan(spec, 8, None, ((8,),))
    assert inside.layout == planned.layout and "tp_inside_node: tp 8 inside nodes, " in inside.reason


def test_tp_crosses_nodes_if_nothing_else_fits_into_memory() -> None:
    spec = parse_spec(WIDE)
    of_four, of_two = plan(spec, 8, None, ((4, 4),)), plan(spec, 8, None, ((2, 2, 2, 2),))
    assert of_four.fits and of_four.layout.tp == 4
    assert of_two.fits and of_two.layout.tp > 2
    assert f"tp {of_two.layout.tp} between nodes, " in of_two.reason
    seconds = {racks: _fixed_tp(WIDE, 4, racks).step_s for racks in [((4, 4),), ((2, 2, 2, 2),), ((2, 2), (2, 2))]}
    assert list(seconds.values()) == sorted(set(seconds.values())), "tp costs what it crosses"


def _fixed_tp(document: dict[str, Any], tp: int, racks: Racks) -> Prediction:
    spec = parse_spec(
        {**document, "parallelism": {"tp": tp, "cp": 2}, "elasticity": {"max_workers": 8, "min_workers": 8}}
    )
    return rank(spec, 8, None, 1, racks).predictions[0]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple), st.data())
def test_all_tp_groups_have_room_inside_nodes(nodes: tuple[int, ...], data: st.DataObject) -> None:
    world = data.draw(st.integers(1, sum(nodes)))
    planned = plan(parse_spec(LARGE), world, None, (nodes,))
    layout = planned.layout
    assert layout.world_size <= world
    if planned.fits and plan(parse_spec(LARGE), world, None, ((1,) * world,)).fits:
        assert sum(size // layout.tp for size in nodes) >= layout.world_size // layout.tp
