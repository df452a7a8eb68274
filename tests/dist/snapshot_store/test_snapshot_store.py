"""The snapshots of one node: which are kept, which are deleted, and that a hundred of them use the memory of one."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_workers.contract.snapshots import SnapshotPart, SnapshotSource
from shoal_workers.snapshot_store.slots.registry import sweep_stale
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull, SnapshotLost
from shoal_workers.snapshot_store.store import SnapshotStore


def _state(value: float, numel: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((numel,), float(value)), "n": torch.tensor(int(value)), "e": torch.zeros(0, 3)}


def _snapshot(store: SnapshotStore, step: int, *, generation: int = 1, numel: int = 1000, **changes: Any) -> float:
    values: dict[str, Any] = {"rank": 0, "world_size": 1, "extra": {"step": step}, **changes}
    return store.snapshot(_state(step, numel), generation=generation, step=step, **values)


def _load(store: SnapshotStore, source: SnapshotSource, numel: int = 1000) -> float:
    """The value that the state has afterwards."""
    state = _state(-1, numel)
    loaded = store.load(state, source, check=_nothing)
    assert loaded.extra == {"step": source.step}
    assert bool((state["w"] == state["n"]).all())
    return float(state["n"])


def _nothing() -> None:
    pass


def _steps(store: SnapshotStore) -> list[tuple[int, int]]:
    return [(held.generation, held.step) for held in store.snapshot_parts()]


def test_live_tensors_may_change_after_a_snapshot(nodes: Any) -> None:
    store = nodes.start()
    state = _state(7)
    assert store.snapshot(state, generation=1, rank=0, world_size=1, step=7, extra={"step": 7}) > 0
    state["w"].fill_(9)
    assert _load(store, nodes.source(store, step=7)) == 7


def test_the_two_newest_snapshots_are_kept(nodes: Any) -> None:
    store = nodes.start()
    assert store.snapshot_parts() == ()
    for step in range(1, 6):
        _snapshot(store, step)
    num_bytes = 4032 + 64  # 1000 floats, one integer and an empty tensor, each at a multiple of 64
    assert store.snapshot_parts() == tuple(
        SnapshotPart(generation=1, rank=0, world_size=1, step=step, num_bytes=num_bytes, node_id="a") for step in (4, 5)
    )
    assert [_load(store, nodes.source(store, step=step)) for step in (4, 5)] == [4, 5]


def test_parts_are_listed_by_every_process_of_the_node_and_by_no_other(nodes: Any) -> None:
    first, second, elsewhere = nodes.start("a"), nodes.start("a"), nodes.start("b")
    _snapshot(first, 1, rank=0, world_size=2)
    _snapshot(second, 1, rank=1, world_size=2)
    assert first.snapshot_parts() == second.snapshot_parts()
    assert [held.rank for held in first.snapshot_parts()] == [0, 1]
    assert elsewhere.snapshot_parts() == ()


def test_the_restored_snapshot_is_kept_until_the_new_layout_has_its_own(nodes: Any) -> None:
    """Slots that are too small are not reused; the preparation for the new layout must not delete them."""
    store = nodes.start()
    for step in (10, 11):
        _snapshot(store, step)
    numel = 1 << 20
    store.prepare(_state(0, numel), rank=0, world_size=1)
    assert _steps(store) == [(1, 10), (1, 11)]
    assert _load(store, nodes.source(store, step=10)) == 10
    store.prepare(_state(0, numel), rank=0, world_size=1)
    _snapshot(store, 11, generation=2, numel=numel)
    assert (2, 11) in _steps(store)
    _snapshot(store, 12, generation=2, numel=numel)
    assert _steps(store) == [(2, 11), (2, 12)]
    assert _load(store, nodes.source(store, step=12, generation=2), numel) == 12


def test_plain_values_may_grow_beyond_their_room(nodes: Any) -> None:
    store = nodes.start()
    for step, length in enumerate([10, 300_000, 5, 2_000_000], start=1):
        _snapshot(store, step, extra={"step": step, "text": "x" * length})
        loaded = store.load(_state(-1), nodes.source(store, step=step), check=_nothing)
        assert loaded.extra == {"step": step, "text": "x" * length}


def test_plain_tensors_are_stored_by_rank_0_only_by_default(nodes: Any) -> None:
    for node, rank, owns, expected in [("a", 0, None, 24), ("b", 1, None, 0), ("c", 1, True, 24), ("d", 0, False, 0)]:
        store = nodes.start(node)
        store.prepare({"w": torch.arange(3)}, rank=rank, world_size=2, owns_replicated=owns)
        store.snapshot(
            {"w": torch.arange(3)}, generation=1, rank=rank, world_size=2, step=1, extra={}, owns_replicated=owns
        )
        assert [held.num_bytes for held in store.snapshot_parts()] == [expected]


def test_a_part_that_does_not_exist_is_lost(nodes: Any) -> None:
    store = nodes.start()
    _snapshot(store, 1)
    with pytest.raises(SnapshotLost, match="no longer exists") as caught:
        store.load(_state(-1), nodes.source(store, step=2), check=_nothing)
    lost = caught.value
    assert (lost.generation, lost.step, lost.rank, lost.node_id) == (1, 2, 0, "a")


def test_snapshot_of_another_model_is_lost(nodes: Any) -> None:
    store = nodes.start()
    _snapshot(store, 1)
    with pytest.raises(SnapshotLost, match="it has no v"):
        store.load({"v": torch.zeros(3)}, nodes.source(store, step=1), check=_nothing)


def test_a_part_of_another_world_size_is_lost(nodes: Any) -> None:
    store = nodes.start()
    _snapshot(store, 1, world_size=2)
    with pytest.raises(SnapshotLost, match="its world size is 2, not 1"):
        store.load(_state(-1), nodes.source(store, step=1), check=_nothing)


def test_a_part_that_is_overwritten_during_a_read_is_lost(nodes: Any) -> None:
    store = nodes.start()
    for step in (1, 2):
        _snapshot(store, step)
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 2:  # the index has been read, the values have not
            _snapshot(store, 3)

    with pytest.raises(SnapshotLost, match="overwritten while it was read"):
        store.load(_state(-1), nodes.source(store, step=1), check=check)


def test_a_fenced_generation_stops_its_load(nodes: Any) -> None:
    store = nodes.start()
    _snapshot(store, 1)

    class Fenced(Exception):
        pass

    def check() -> None:
        raise Fenced

    with pytest.raises(Fenced):
        store.load(_state(-1), nodes.source(store, step=1), check=check)


def test_full_memory_leaves_earlier_snapshots_unchanged(nodes: Any) -> None:
    """A tensor that claims 4 TiB without having them: the tmpfs refuses before it allocates a page."""
    store = nodes.start()
    _snapshot(store, 1)
    huge = {"w": torch.zeros(1).expand(1 << 40)}
    with pytest.raises(SharedMemoryFull) as caught:
        store.prepare(huge, rank=0, world_size=1)
    assert caught.value.needed_bytes > 1 << 42 > caught.value.free_bytes
    with pytest.raises(SharedMemoryFull):
        store.snapshot(huge, generation=1, rank=0, world_size=1, step=2, extra={})
    assert _steps(store) == [(1, 1)]
    _snapshot(store, 2)
    assert _steps(store) == [(1, 1), (1, 2)]


def test_a_removed_attempt_has_no_snapshots_while_its_processes_live(nodes: Any) -> None:
    first, second = nodes.start("a"), nodes.start("a")
    for store in (first, second):
        _snapshot(store, 1)
    first.registry.remove_attempt()
    assert second.snapshot_parts() == ()
    assert list(nodes.root.iterdir()) == []
    with pytest.raises(SharedMemoryFull, match="the directory of the attempt was removed"):
        _snapshot(second, 2)  # training that does not know it yet
    assert second.snapshot_parts() == ()


def test_a_new_store_sweeps_earlier_attempts_of_its_job_without_a_live_process(nodes: Any) -> None:
    dead = nodes.start(job_id="dead")
    base = dead.registry.path.parent.parent.parent
    shutil.copytree(base / "dead-a1", base / "dead-a2")  # files without a holder of their lock
    other = nodes.start()
    assert sorted(path.name for path in base.iterdir()) == ["dead-a1", "dead-a2", "job-a1"]
    assert other.snapshot_parts() == ()
    live = nodes.start(job_id="dead", attempt=3)
    assert sorted(path.name for path in base.iterdir()) == ["dead-a1", "dead-a3", "job-a1"]
    assert sweep_stale(nodes.root) == []
    assert live.snapshot_parts() == ()


def test_memory_does_not_grow_over_a_hundred_snapshots_and_loads(nodes: Any) -> None:
    store, other = nodes.start("a"), nodes.start("b")
    sizes = [30_000, 30_000, 31_000]  # in bytes: within a slot's capacity, so that layouts change but files do not

    def cycle(number: int) -> None:
        generation = 1 + number // 10
        numel = sizes[generation % 3] // 4
        _snapshot(store, number, generation=generation, numel=numel)
        source = nodes.source(store, step=number, generation=generation)
        assert _load(store, source, numel) == number
        assert _load(other, source, numel) == number
        assert store.replicate(nodes.server(other))
        while store.sender.take_cost() is None:
            threading.Event().wait(0.001)
        store.drop_older(generation)
        other.drop_older(generation)

    for number in range(30):
        cycle(number)
    before = _resources()
    for number in range(30, 130):
        cycle(number)
    more = _more_than(before)
    give_up = time.monotonic() + 60
    while more and time.monotonic() < give_up:  # a serving thread closes its connection a moment after its client
        threading.Event().wait(0.01)
        more = _more_than(before)
    assert more == {}


def _more_than(before: dict[str, int]) -> dict[str, int]:
    after = _resources()
    return {name: after[name] - before[name] for name in after if after[name] > before[name] + 1}


def _resources() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": sum(not thread.name.startswith("snapshot-serve") for thread in threading.enumerate()),
        "maps": sum("/own-" in line or "/buddy-" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }
