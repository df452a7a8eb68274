"""More clients than a server has threads: each is served in its turn."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.server import MAX_CONNECTIONS
from shoal_workers.snapshot_store.transfer.wire import connect

_NUM_BYTES = 4000


def _nothing() -> None:
    pass


@pytest.fixture
def writer(nodes: Any) -> SnapshotStore:
    """A store on node `a` with the snapshot of generation 1 at step 1."""
    store: SnapshotStore = nodes.start("a")
    store.snapshot({"w": torch.arange(1000.0)}, generation=1, rank=0, world_size=1, step=1, extra={})
    return store


def _read(store: SnapshotStore, source: Any) -> int:
    """Bytes that were read over the network."""
    state = {"w": torch.zeros(1000)}
    loaded = store.load(state, source, check=_nothing)
    assert torch.equal(state["w"], torch.arange(1000.0))
    return loaded.remote_bytes


def test_more_ranks_than_there_are_threads_read_at_once(nodes: Any, writer: SnapshotStore) -> None:
    readers, source = [nodes.start(f"b{number}") for number in range(4)], nodes.source(writer, step=1)
    read: list[int] = []
    threads = [
        threading.Thread(target=lambda number=number: read.append(_read(readers[number % 4], source)))
        for number in range(3 * MAX_CONNECTIONS)
    ]
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(connect(source.parts[0], "secret", check=_nothing, patience_s=60.0))
        for thread in threads:
            thread.start()
        assert read == [], "no thread is free for them"
    for thread in threads:
        thread.join()
    assert read == [_NUM_BYTES] * len(threads)


def test_a_rank_reads_only_the_parts_that_it_needs(nodes: Any) -> None:
    """The stores of the others are closed: no connection to them is possible."""
    stores = [nodes.start(f"a{rank}") for rank in range(9)]
    for rank, store in enumerate(stores):
        state = {f"w{rank}": torch.full((10,), float(rank))}
        store.snapshot(state, generation=1, rank=rank, world_size=9, step=1, extra={"of": rank}, owns_replicated=True)
    source = nodes.source(*stores, step=1)
    for rank in (1, 2, 3, 4, 6, 7, 8):
        stores[rank].close()
    state = {"w0": torch.zeros(10), "w5": torch.zeros(10)}
    loaded = nodes.start("b").load(state, source, check=_nothing)
    assert (loaded.extra, loaded.remote_bytes) == ({"of": 0}, 80)
    assert state["w5"].tolist() == [5.0] * 10
