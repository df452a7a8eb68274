"""What is read for a state, and which indexes are refused before a byte is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch
from shoal_workers.checkpoint.index import IndexItem, ShardIndex
from shoal_workers.checkpoint.load_plan import ItemRead, plan_load, plan_needed

pytestmark = pytest.mark.dist


def _item(first_row: int, num_rows: int, **changes: Any) -> IndexItem:
    """Rows of a float32 tensor `w` of shape (6, 2)."""
    fields: dict[str, Any] = {
        "fqn": "w",
        "dtype": "float32",
        "shape": (6, 2),
        "offsets": (first_row, 0),
        "sizes": (num_rows, 2),
        "file_offset": 0,
        "nbytes": num_rows * 8,
        "crc32": 0,
    }
    return IndexItem.model_validate(fields | changes)


def _index(rank: int, *items: IndexItem) -> ShardIndex:
    return ShardIndex(rank=rank, world_size=3, generation=1, step=1, items=items, extra={})


def test_slices_of_all_ranks_fill_a_complete_tensor() -> None:
    indexes = [_index(0, _item(0, 1)), _index(1, _item(1, 3)), _index(2, _item(4, 2))]
    reads = plan_load({"w": torch.zeros(6, 2)}, indexes, directory="d")
    assert [(read.file, read.fills[0].lengths) for read in reads] == [
        ("shard-00000.bin", (1, 2)),
        ("shard-00001.bin", (3, 2)),
        ("shard-00002.bin", (2, 2)),
    ]


def test_slice_that_several_ranks_wrote_is_read_from_the_lowest() -> None:
    indexes = [_index(0), _index(1, _item(0, 6)), _index(2, _item(0, 6))]
    (read,) = plan_load({"w": torch.zeros(6, 2)}, indexes, directory="d")
    assert read.file == "shard-00001.bin"


def test_tensors_that_are_not_requested_are_not_read() -> None:
    assert plan_load({}, [_index(0, _item(0, 6))], directory="d") == []


def test_hole_between_the_slices_is_refused() -> None:
    indexes = [_index(0, _item(0, 2)), _index(1, _item(3, 3))]
    with pytest.raises(StateMismatch, match="of w it contains only 10 of the 12 elements that this rank needs"):
        plan_load({"w": torch.zeros(6, 2)}, indexes, directory="d")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "bfloat16", "nbytes": 12}, r"records w as torch.bfloat16 \(6, 2\), but a lower rank"),
        ({"shape": (7, 2)}, r"records w as torch.float32 \(7, 2\), but a lower rank"),
        ({"dtype": "nosuch"}, "gives w the unknown dtype 'nosuch'"),
        ({"dtype": "load"}, "gives w the unknown dtype 'load'"),
        ({"nbytes": 23}, r"gives w 23 bytes for float32 of \(3, 2\)"),
    ],
)
def test_index_that_contradicts_itself_or_others_is_damage(changes: dict[str, Any], problem: str) -> None:
    indexes = [_index(0, _item(0, 3)), _index(1, _item(3, 3, **changes))]
    with pytest.raises(DamagedCheckpoint, match=rf"shard-00001\.json {problem}"):
        plan_load({"w": torch.zeros(6, 2)}, indexes, directory="d")


_SHAPES = {"large": (1000, 3), "small": (32, 3), "tiny": (5, 3), "vector": (48,)}


@contextmanager
def _state(rank: int, world_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """What a rank of a world of shards has; no other rank exists."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        yield {
            fqn: distribute_tensor(torch.zeros(*shape), mesh, [Shard(0)], src_data_rank=None)
            for fqn, shape in _SHAPES.items()
        }
    finally:
        dist.destroy_process_group()


def _saved(world_size: int) -> list[ShardIndex]:
    items: list[list[IndexItem]] = [[] for _ in range(world_size)]
    for fqn, shape in _SHAPES.items():
        first = 0
        for rank, chunk in enumerate(torch.zeros(*shape).chunk(world_size)):
            offsets = (first, *(0,) * (len(shape) - 1))
            sizes = tuple(chunk.shape)
            items[rank].append(_item(0, 0, fqn=fqn, shape=shape, offsets=offsets, sizes=sizes, nbytes=chunk.nbytes))
            first += len(chunk)
    return [_index(rank, *own) for rank, own in enumerate(items)]


def _summary(reads: Sequence[ItemRead]) -> list[Any]:
    return [(read.file, read.item, [(fill.source_offsets, fill.lengths) for fill in read.fills]) for read in reads]


@pytest.mark.parametrize("loaded", [1, 2, 7, 31, 33])
@pytest.mark.parametrize("saved", [1, 3, 32, 40])
def test_the_reads_of_the_needed_parts_are_those_of_all_parts(saved: int, loaded: int) -> None:
    indexes, opened = _saved(saved), set[int]()

    def read_indexes(ranks: Sequence[int]) -> list[ShardIndex]:
        assert not opened & set(ranks)
        opened.update(ranks)
        return [indexes[rank] for rank in ranks]

    for rank in range(loaded):
        opened.clear()
        with _state(rank, loaded) as state:
            plan = plan_needed(state, saved, read_indexes, directory="d")
            assert _summary(plan.reads) == _summary(plan_load(state, indexes, directory="d"))
        used = {int(read.file[6:11]) for read in plan.reads}
        assert opened >= used | {0}
        assert len(opened) <= len(used) + 3


def test_a_tensor_that_no_part_has_is_refused_after_all_parts_were_opened() -> None:
    indexes = [_index(0, _item(0, 6)), _index(1), _index(2)]
    with pytest.raises(StateMismatch, match="it has no other"):
        plan_needed({"other": torch.zeros(2)}, 3, lambda ranks: [indexes[rank] for rank in ranks], directory="d")


def _state_index(*names: str) -> ShardIndex:
    return _index(0, *(_item(0, 6, fqn=name) for name in names))


@pytest.mark.parametrize(
    ("saved", "absent"),
    [
        (("model.w", "optim.w.average", "optim.w.step"), set()),
        (("model.w",), {"optim.w.average", "optim.w.step"}),
        (("model.w", "optim.w.other.average"), {"optim.w.average", "optim.w.step"}),
    ],
)
def test_optional_tensors_may_be_absent_a_whole_group_at_a_time(saved: tuple[str, ...], absent: set[str]) -> None:
    state = {name: torch.zeros(6, 2) for name in ("model.w", "optim.w.average", "optim.w.step")}
    optional = {name: "model.w" for name in state if name.startswith("optim.")}
    plan = plan_needed(state, 1, lambda ranks: [_state_index(*saved)], directory="d", optional=optional)
    assert plan.absent == absent
    assert {read.item.fqn for read in plan.reads} == state.keys() - absent


@pytest.mark.parametrize("saved", ["optim.w.step", "optim.w.momentum"])
def test_the_state_of_another_optimizer_is_refused(saved: str) -> None:
    state = {name: torch.zeros(6, 2) for name in ("model.w", "optim.w.average", "optim.w.step")}
    optional = {name: "model.w" for name in state if name.startswith("optim.")}
    index = _state_index("model.w", saved)
    with pytest.raises(StateMismatch, match=r"it has no optim\.w\.average"):
        plan_needed(state, 1, lambda ranks: [index], directory="d", optional=optional)


def test_the_plain_values_of_every_part_that_was_opened_are_known() -> None:
    """Those of a pipeline's second stage are in no part of the first."""
    parts = [_index(0, _item(0, 6)), _index(1, _item(0, 6, fqn="v"))]
    indexes = [part.model_copy(update={"extra": {"of": rank}}) for rank, part in enumerate(parts)]
    state = {"v": torch.zeros(6, 2)}
    plan = plan_needed(state, 2, lambda ranks: [indexes[rank] for rank in ranks], directory="d")
    assert (plan.extra, plan.other_extras) == ({"of": 0}, ({"of": 1},))
