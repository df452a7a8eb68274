"""The slot pool allocates, lists and removes slots, and leaves no file behind."""

import tempfile
from pathlib import Path

import pytest

from shoal_workers.snapshot_store.slots.slot_files import SlotPool, at, fitting
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

MIB = 1 << 20


def test_slots_are_listed_in_the_order_of_their_allocation(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    slots = tuple(pool.allocate(4096) for _ in range(3))
    assert pool.slots == slots
    assert [slot.path.name for slot in slots] == ["own-1", "own-2", "own-3"]
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_name_of_a_removed_slot_is_not_used_again(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "buddy")
    first, second = pool.allocate(4096), pool.allocate(4096)
    pool.release([first])
    assert pool.slots == (second,)
    assert pool.allocate(4096).path.name == "buddy-3"
    pool.close()


def test_slot_that_cannot_be_allocated_is_not_listed(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path / "removed", "own")
    with pytest.raises(SharedMemoryFull):
        pool.allocate(4096)
    assert pool.slots == ()


def test_an_allocation_is_tried_again_once_there_is_room(tmp_path: Path) -> None:
    directory = tmp_path / "later"

    def make_room() -> bool:
        directory.mkdir()
        return True

    pool = SlotPool(directory, "own", make_room)
    assert pool.allocate(4096).path.exists()
    pool.close()
    with pytest.raises(SharedMemoryFull):
        SlotPool(tmp_path / "removed", "own", lambda: False).allocate(4096)


def test_slots_are_split_by_size(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    small, middle, large = (pool.allocate(size * MIB) for size in (1, 4, 16))
    assert fitting(pool.slots, 3 * MIB) == [middle]
    assert at(pool.slots, [2, 0]) == [large, small]
    pool.close()


def test_the_slot_that_fits_is_taken_over_as_it_is(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    middle = [pool.allocate(size * MIB) for size in (1, 4, 16)][1]
    assert pool.take_over(pool.slots, 3 * MIB) is middle
    assert pool.take_over([], 3 * MIB) is None
    assert [slot.capacity_bytes for slot in pool.slots] == [MIB, 4 * MIB, 16 * MIB]
    pool.close()


def test_without_one_that_fits_the_closest_in_size_is_resized(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    small, large = pool.allocate(2 * MIB), pool.allocate(32 * MIB)
    assert pool.take_over(pool.slots, 5 * MIB, headroom_bytes=MIB) is small
    assert small.capacity_bytes == 6 * MIB
    assert pool.take_over([large], 8 * MIB) is large
    assert large.capacity_bytes == 8 * MIB
    assert pool.slots == (small, large)
    pool.close()


def test_slots_that_may_be_overwritten_make_room_for_the_one_that_grows() -> None:
    """In a real tmpfs, which refuses before it allocates a page."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        pool = SlotPool(Path(folder), "own")
        small, large = pool.allocate(MIB), pool.allocate(2 * MIB)
        with pytest.raises(SharedMemoryFull):
            pool.take_over(pool.slots, 1 << 60)
        assert pool.slots == (large,)
        assert large.capacity_bytes == 2 * MIB
        assert not small.path.exists()
        pool.close()
