"""Whatever the layout of the saved parts, what a rank needs is covered; in usual layouts, few parts are opened."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

import pytest

from shoal_workers.checkpoint.load_plan import Box, Follower, NeededParts, Numbers, Wanted, group_of

_SHAPES: dict[str, Numbers] = {
    "embed": (1000, 48),
    "wq": (48, 48),
    "wk": (24, 48),
    "up": (128, 48),
    "norm": (48,),
    "bias": (5,),
    "scalar": (),
    "empty": (0, 4),
}
Part = list[tuple[str, Numbers, Numbers]]


def _chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Offset and size of a chunk, as torch.chunk splits."""
    step = -(-size // count)
    first = min(index * step, size)
    return first, min(step, size - first)


def _cut(box: Box, dim: int, count: int, index: int) -> Box:
    offset, size = _chunk(box[1][dim], count, index)
    offsets, sizes = list(box[0]), list(box[1])
    offsets[dim], sizes[dim] = offsets[dim] + offset, size
    return tuple(offsets), tuple(sizes)


def _whole(shape: Numbers) -> Box:
    return (0,) * len(shape), shape


def _parts(pp: int, shards: int, tp: int) -> list[Part]:
    """What the ranks of `pp x shards x tp` save, tp innermost. tp splits dim 0, and shards dim 1 then."""
    parts: list[Part] = []
    names = list(_SHAPES)
    for stage, shard, slot in product(range(pp), range(shards), range(tp)):
        part: Part = []
        for name in names[stage * len(names) // pp : (stage + 1) * len(names) // pp]:
            shape, box = _SHAPES[name], _whole(_SHAPES[name])
            if len(shape) == 0 or 0 in shape:
                if shard == slot == 0:
                    part.append((name, *box))
                continue
            is_split = len(shape) == 2 and tp > 1
            if is_split:
                box = _cut(box, 0, tp, slot)
            elif slot:
                continue
            box = _cut(box, 1 if is_split else 0, shards, shard)
            if prod(box[1]):
                part.append((name, *box))
        parts.append(part)
    return parts


def _wanted(shards: int, shard: int) -> dict[str, Wanted]:
    """What a rank needs whose parameters are split over dim 0."""
    wanted = {}
    for name, shape in _SHAPES.items():
        box = _cut(_whole(shape), 0, shards, shard) if shape else _whole(shape)
        wanted[name] = Wanted(shape, (box,))
    return wanted


def _open(wanted: Mapping[str, Wanted], parts: Sequence[Part]) -> set[int]:
    """The parts that were opened, each once."""
    needed, opened = NeededParts(wanted, len(parts)), list[int]()
    while chosen := needed.take():
        assert chosen == sorted(chosen)
        for number in chosen:
            opened.append(number)
            needed.opened(number, parts[number])
    assert len(set(opened)) == len(opened)
    return set(opened)


def _elements(box: Box) -> set[Numbers]:
    offsets, sizes = box
    return set(product(*(range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))))


def _lacking(wanted: Mapping[str, Wanted], parts: Sequence[Part], opened: set[int]) -> dict[str, int]:
    """Elements by tensor that no opened part has, and 1 for a tensor of which no slice was seen."""
    lacking = {}
    for name, one in wanted.items():
        slices = [(offsets, sizes) for number in opened for fqn, offsets, sizes in parts[number] if fqn == name]
        need = set[Numbers]().union(*map(_elements, one.boxes))
        left = need - set[Numbers]().union(*map(_elements, slices)) if slices else {(-1,)}
        if left:
            lacking[name] = len(left)
    return lacking


_LAYOUTS = [(1, 1, 1), (1, 4, 1), (1, 7, 1), (1, 48, 1), (1, 4, 2), (1, 3, 4), (2, 4, 1), (4, 3, 2), (3, 5, 1)]


@pytest.mark.cells(6)
@pytest.mark.parametrize(("pp", "shards", "tp"), _LAYOUTS)
@pytest.mark.parametrize("readers", [1, 3, 6, 47])
def test_what_is_needed_is_covered(pp: int, shards: int, tp: int, readers: int) -> None:
    parts = _parts(pp, shards, tp)
    for rank in range(readers):
        wanted = _wanted(readers, rank)
        assert _lacking(wanted, parts, _open(wanted, parts)) == {}


@pytest.mark.cells(4)
@pytest.mark.parametrize("seed", range(20))
def test_it_is_covered_in_whatever_order_the_parts_are(seed: int) -> None:
    chance = random.Random(seed)
    parts = _parts(*chance.choice(_LAYOUTS))
    chance.shuffle(parts)
    readers = chance.randint(1, 9)
    wanted = _wanted(readers, chance.randrange(readers))
    assert _lacking(wanted, parts, _open(wanted, parts)) == {}


@pytest.mark.cells(4)
@pytest.mark.parametrize("seed", range(20))
def test_slices_of_uneven_sizes_are_covered(seed: int) -> None:
    chance = random.Random(seed)
    ends = sorted({0, 1000, *(chance.randrange(1000) for _ in range(30))})
    parts: list[Part] = [[("w", (first,), (end - first,))] for first, end in pairwise(ends)]
    first = chance.randrange(1000)
    wanted = {"w": Wanted((1000,), (((first,), (chance.randint(1, 1000 - first),)),))}
    assert _lacking(wanted, parts, _open(wanted, parts)) == {}


@pytest.mark.parametrize("saved", [8, 32, 512])
def test_after_a_loss_a_rank_opens_few_parts(saved: int) -> None:
    """A rank needs two parts of the large parameters, and one or two more of each small one."""
    shapes = {"large": (saved * 100, 8), "small": (saved, 8)}
    parts: list[Part] = []
    for shard in range(saved):
        boxes = {name: _cut(_whole(shape), 0, saved, shard) for name, shape in shapes.items()}
        parts.append([(name, *box) for name, box in boxes.items()])
    numbers = []
    for rank in range(saved - 1):
        boxes = {name: _cut(_whole(shape), 0, saved - 1, rank) for name, shape in shapes.items()}
        wanted = {name: Wanted(shapes[name], (box,)) for name, box in boxes.items()}
        opened = _open(wanted, parts)
        assert _lacking(wanted, parts, opened) == {}
        numbers.append(len(opened))
    assert max(numbers) <= 6


@pytest.mark.parametrize(("shards", "tp"), [(16, 2), (8, 8), (64, 4)])
def test_a_grid_of_two_axes_is_found(shards: int, tp: int) -> None:
    shape = (tp * 64, shards * 16)
    parts: list[Part] = [
        [("w", *_cut(_cut(_whole(shape), 0, tp, slot), 1, shards, shard))]
        for shard, slot in product(range(shards), range(tp))
    ]
    for rank in range(len(parts)):
        wanted = {"w": Wanted(shape, ((parts[rank][0][1], parts[rank][0][2]),))}
        assert len(_open(wanted, parts)) <= 3


def test_a_stage_is_found_between_others() -> None:
    pp, shards = 8, 64
    parts: list[Part] = [
        [(f"w{stage}", *_cut(_whole((shards * 4, 2)), 0, shards, shard))]
        for stage, shard in product(range(pp), range(shards))
    ]
    for stage in range(pp):
        wanted = {f"w{stage}": Wanted((shards * 4, 2), (((40 * 4, 0), (4, 2)),))}
        opened = _open(wanted, parts)
        assert stage * shards + 40 in opened
        assert len(opened) <= 2 * pp


def test_only_part_0_is_opened_for_nothing() -> None:
    assert _open({}, _parts(1, 7, 1)) == {0}


def test_every_part_is_opened_for_a_tensor_that_none_has() -> None:
    assert _open({"other": Wanted((4,), ())}, _parts(1, 48, 1)) == set(range(48))


def test_tensors_that_the_source_lacks_open_no_part_beside_those_of_their_owner() -> None:
    """A parameter without optimizer state, of the second of two stages with eight shards each: of 16 parts, one."""
    half = (8, 4)
    parts: list[Part] = [
        [(f"model.{'ab'[stage]}", (4 * shard, 0), (4, 4)) for _ in range(1)] for stage in range(2) for shard in range(8)
    ]
    own = Wanted((32, 4), (((0, 0), half),))
    wanted = {"model.b": own, "optim.b.exp_avg": own, "optim.b.step": Wanted((), (((), ()),))}
    followers = {
        "optim.b.exp_avg": Follower("optim.b", "model.b"),
        "optim.b.step": Follower("optim.b", None),
    }
    needed, opened = NeededParts(wanted, len(parts), followers), list[int]()
    while chosen := needed.take():
        for part in chosen:
            opened.append(part)
            needed.opened(part, parts[part])
    assert {8, 9} <= set(opened) and len(opened) <= 6


def test_a_part_that_has_another_tensor_of_the_group_does_not_show_that_the_group_is_lacking() -> None:
    box = Wanted((4,), (((0,), (4,)),))
    needed = NeededParts({"model.b": box, "optim.b.x": box}, 2, {"optim.b.x": Follower("optim.b", "model.b")})
    assert needed.take() == [0]
    needed.opened(0, [("model.b", (0,), (4,)), ("optim.b.step", (), ())])
    assert needed.take() == [1]


def test_the_average_of_a_parameter_may_be_absent_without_its_moments() -> None:
    assert group_of("optim.head.weight.exp_avg") == group_of("optim.head.weight.step") == "optim.head.weight"
    assert group_of("optim.head.weight.weights_ema") == "optim.head.weight.weights_ema"
