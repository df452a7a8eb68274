"""Errors of the snapshot store name the loss and the way out, and survive pickling."""

import pickle

import pytest

from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull, SnapshotLost, SnapshotStoreError


@pytest.mark.parametrize(
    "error",
    [SnapshotLost(3, 41, 2, "node-b", "it is gone"), SharedMemoryFull("/dev/shm/x", 100, 7, "No space left on device")],
)
def test_errors_survive_pickling(error: SnapshotStoreError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_lost_part_names_part_node_and_reason() -> None:
    result = str(SnapshotLost(3, 41, 2, "node-b", "it was overwritten"))
    assert "part of rank 2" in result
    assert "generation 3 at step 41" in result
    assert "node node-b: it was overwritten" in result


def test_full_memory_names_the_needed_and_free_bytes_and_the_way_out() -> None:
    result = str(SharedMemoryFull("/dev/shm/x", 100, 7, "No space left on device"))
    assert "needs 100 bytes of shared memory in /dev/shm/x, where 7 are free" in result
    assert "snapshot.enabled: false" in result
