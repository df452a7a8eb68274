"""What is read for a state, and which indexes are refused before a byte is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch
from shoal_workers.checkpoint.index import IndexItem, ShardIndex
from shoal_workers.checkpoint.load_plan import plan_load

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
