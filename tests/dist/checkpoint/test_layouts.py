"""Any layout loads into any other, bit for bit: plain, FSDP2 at 1 to 4 ranks, HSDP, FSDP x TP; uneven and empty."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal_workers.checkpoint.index import ShardIndex

pytestmark = pytest.mark.dist

_LAYOUTS = ("plain", "fsdp1", "fsdp2", "fsdp3", "fsdp4", "hsdp2x2", "fsdp2xtp2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def differing(answer_of: Callable[..., dict[str, list[str]]], root: Path) -> dict[str, list[str]]:
    """What every pair of layouts got wrong, as the four processes saw it."""
    return answer_of("checkpoint_layouts.py", root)


def test_state_is_bit_equal_after_resharding_between_all_pairs(differing: dict[str, list[str]]) -> None:
    assert differing == {f"{saved}->{loaded}": [] for saved, loaded in itertools.product(_LAYOUTS, _LAYOUTS)}


def test_every_element_is_written_exactly_once(differing: dict[str, list[str]], root: Path) -> None:
    elements = {layout: _elements_written(root / layout) for layout in _LAYOUTS if "tp" not in layout}
    assert {layout: written for layout, (written, _) in elements.items()} == {
        layout: desired for layout, (_, desired) in elements.items()
    }
    assert all("optimizer.up.weight.exp_avg" in desired for _, desired in elements.values())


def test_only_tensors_on_a_submesh_are_written_more_than_once(differing: dict[str, list[str]], root: Path) -> None:
    written, desired = _elements_written(root / "fsdp2xtp2")
    unsplit = {fqn for fqn in desired if "scale" in fqn or "shift" in fqn or fqn in ("model.seen", "model.table")}
    assert all(written[fqn] == desired[fqn] for fqn in desired.keys() - unsplit)
    assert all(desired[fqn] <= written[fqn] <= 2 * desired[fqn] for fqn in unsplit)


def test_a_shard_may_be_empty(differing: dict[str, list[str]], root: Path) -> None:
    by_rank = [
        {item.fqn for item in ShardIndex.from_json(path.read_bytes()).items}
        for path in sorted((root / "fsdp4").glob("*/shard-*.json"))
    ]
    assert "model.shift" in by_rank[0]
    assert all("model.shift" not in fqns for fqns in by_rank[1:])


def _elements_written(directory: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Per tensor: elements in all ranks' files, and elements of the global tensor."""
    written: dict[str, int] = {}
    desired: dict[str, int] = {}
    for path in sorted(directory.glob("*/shard-*.json")):
        for item in ShardIndex.from_json(path.read_bytes()).items:
            written[item.fqn] = written.get(item.fqn, 0) + math.prod(item.sizes)
            desired[item.fqn] = math.prod(item.shape)
    return written, desired
