"""Slots: a part between `finish` and `begin`, the pool, the ring of log entries, and which may be overwritten."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.slot_files import (
    PAGE_BYTES,
    PartHeader,
    Regions,
    SlotFile,
    SlotPool,
    Stamp,
    fitting,
    read_header,
    read_sequence,
)
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

_REGIONS = Regions.lay_out(index_bytes=10, extra_room=100, num_bytes=5000)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[SlotFile]:
    slot = SlotFile(tmp_path / "own-1", _REGIONS.file_bytes)
    yield slot
    slot.remove()


def _read(path: Path) -> PartHeader | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd)
    finally:
        os.close(fd)


def _finish(slot: SlotFile, step: int = 7) -> None:
    slot.finish(_REGIONS, Stamp(3, 1, 4, step), num_extra_bytes=2)


def test_a_finished_part_is_read_as_it_was_written(slot: SlotFile) -> None:
    _finish(slot)
    found = _read(slot.path)
    assert found is not None
    assert found == slot.header
    assert (found.generation, found.rank, found.world_size, found.step, found.num_bytes) == (3, 1, 4, 7, 5000)


def test_payload_is_page_aligned_and_regions_do_not_overlap() -> None:
    for index_bytes, extra_room in [(0, 0), (1, 1), (5000, 70_000)]:
        regions = Regions.lay_out(index_bytes=index_bytes, extra_room=extra_room, num_bytes=3)
        assert regions.payload_offset % PAGE_BYTES == 0
        assert regions.index_offset >= PAGE_BYTES
        assert regions.index_offset + index_bytes <= regions.extra_offset
        assert regions.extra_offset + extra_room <= regions.payload_offset
        assert regions.payload_offset + 3 <= regions.file_bytes


@pytest.mark.parametrize("content", [b"", b"SHOALRM1", b"x" * 5000])
def test_other_files_are_not_read_as_parts(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own-9").write_bytes(content)
    assert _read(tmp_path / "own-9") is None


def test_a_part_longer_than_its_file_does_not_count(slot: SlotFile) -> None:
    slot.finish(
        Regions.lay_out(index_bytes=10, extra_room=100, num_bytes=1 << 40), Stamp(1, 0, 1, step=1), num_extra_bytes=0
    )
    assert _read(slot.path) is None


def test_a_slot_larger_than_free_memory_raises_memory_full_and_leaves_no_file() -> None:
    """In a real tmpfs, which refuses before it allocates a page; a disk could fill up first."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        with pytest.raises(SharedMemoryFull) as caught:
            SlotFile(Path(folder, "own-1"), 1 << 60)
        assert caught.value.needed_bytes == 1 << 60
        assert 0 < caught.value.free_bytes < 1 << 60
        assert list(Path(folder).iterdir()) == []


def test_a_removed_directory_raises_memory_full(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryFull, match="was removed"):
        SlotFile(tmp_path / "gone" / "own-1", 4096)


def test_a_slot_fits_a_part_that_is_neither_larger_nor_much_smaller(tmp_path: Path) -> None:
    slot = SlotFile(tmp_path / "own-1", 8 << 20)
    assert slot.fits(8 << 20)
    assert slot.fits(4 << 20)
    assert not slot.fits((8 << 20) + 1)
    assert not slot.fits(1 << 20)
    slot.remove()


def test_a_part_stays_readable_while_its_slot_grows_and_who_has_mapped_it_still_sees_the_file(slot: SlotFile) -> None:
    _finish(slot)
    before, memory = slot.header, memoryview(slot.map)
    slot.grow(4 * _REGIONS.file_bytes)
    assert slot.header == before == _read(slot.path)
    slot.map[_REGIONS.payload_offset] = 7
    assert memory[_REGIONS.payload_offset] == 7
    slot.map[4 * _REGIONS.file_bytes - 1] = 1
    slot.begin()
    assert _read(slot.path) is None
    _finish(slot, step=8)
    after = _read(slot.path)
    assert after is not None and before is not None
    assert (after.step, after.sequence) == (8, before.sequence + 2)


def test_a_resized_slot_holds_no_part_and_a_reader_notices_it(slot: SlotFile) -> None:
    for num_bytes in (4 * _REGIONS.file_bytes, _REGIONS.file_bytes):
        _finish(slot)
        fd = os.open(slot.path, os.O_RDONLY)
        sequence = read_sequence(fd)
        slot.resize(num_bytes)
        assert slot.header is None and _read(slot.path) is None
        assert read_sequence(fd) != sequence
        os.close(fd)


def test_memory_that_a_slot_gives_back_is_free_its_file_is_as_long_and_it_can_grow_again() -> None:
    """A reader that has mapped the old part must not be killed by SIGBUS."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        slot = SlotFile(Path(folder, "own-1"), 8 << 20)
        slot.map[(8 << 20) - 1] = 9
        memory = memoryview(slot.map)
        slot.resize(2 << 20)
        assert slot.capacity_bytes == 2 << 20
        found = slot.path.stat()
        assert (found.st_size, found.st_blocks * 512) == (8 << 20, 2 << 20)
        assert memory[(8 << 20) - 1] == 0
        slot.resize(6 << 20)
        assert slot.path.stat().st_blocks * 512 >= 6 << 20
        assert len(slot.map) >= 6 << 20
        memory.release()
        slot.remove()


def test_a_slot_that_cannot_grow_keeps_its_size_and_its_part() -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        slot = SlotFile(Path(folder, "own-1"), _REGIONS.file_bytes)
        _finish(slot)
        with pytest.raises(SharedMemoryFull):
            slot.grow(1 << 60)
        assert slot.capacity_bytes == _REGIONS.file_bytes
        assert _read(slot.path) == slot.header
        slot.path.unlink()
        with pytest.raises(SharedMemoryFull, match="was removed"):
            slot.grow(1 << 20)
        slot.remove()


def test_removed_slot_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        SlotFile(tmp_path / "own-1", 4096).remove()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert list(tmp_path.iterdir()) == []


REGIONS = Regions.lay_out(index_bytes=10, extra_room=100, num_bytes=1000)


def _header(step: int, *, generation: int = 1, rank: int = 0) -> PartHeader:
    return PartHeader(2, generation, rank, 2, step, 0, 0, 0, 0, 0, 0)


MIB = 1 << 20


def test_name_of_a_removed_slot_is_not_used_again(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "buddy")
    first, second = pool.take([], 4096), pool.take([], 4096)
    pool.release([first])
    assert pool.slots == (second,)
    assert pool.take([], 4096).path.name == "buddy-3"
    pool.close()


def test_an_allocation_is_tried_again_once_there_is_room(tmp_path: Path) -> None:
    directory = tmp_path / "later"

    def make_room() -> bool:
        directory.mkdir()
        return True

    pool = SlotPool(directory, "own", make_room)
    assert pool.take([], 4096).path.exists()
    pool.close()
    with pytest.raises(SharedMemoryFull):
        SlotPool(tmp_path / "removed", "own", lambda: False).take([], 4096)


def test_slots_are_split_by_size(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    slots = [pool.take([], size * MIB) for size in (1, 4, 16)]
    assert fitting(pool.slots, 3 * MIB) == [slots[1]]
    pool.close()


def test_the_slot_that_fits_is_taken_over_as_it_is(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    middle = [pool.take([], size * MIB) for size in (1, 4, 16)][1]
    assert pool.take(pool.slots, 3 * MIB) is middle
    assert [slot.capacity_bytes for slot in pool.slots] == [MIB, 4 * MIB, 16 * MIB]
    pool.close()


def test_without_one_that_fits_the_closest_in_size_is_resized(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "own")
    small, large = pool.take([], 2 * MIB), pool.take([], 32 * MIB)
    assert pool.take(pool.slots, 5 * MIB, headroom_bytes=MIB) is small
    assert small.capacity_bytes == 6 * MIB
    assert pool.take([large], 8 * MIB) is large
    assert large.capacity_bytes == 8 * MIB
    assert pool.slots == (small, large)
    pool.close()


def test_slots_that_may_be_overwritten_make_room_for_the_one_that_grows() -> None:
    """In a real tmpfs, which refuses before it allocates a page."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        pool = SlotPool(Path(folder), "own")
        small, large = pool.take([], MIB), pool.take([], 2 * MIB)
        with pytest.raises(SharedMemoryFull):
            pool.take(pool.slots, 1 << 60)
        assert pool.slots == (large,)
        assert large.capacity_bytes == 2 * MIB
        assert not small.path.exists()
        pool.close()


def _part(generation: int, step: int, rank: int = 0) -> PartHeader:
    return PartHeader(2, generation, rank, 1, step, 0, 0, 0, 0, 0, 0)


class _Slot(NamedTuple):
    number: int
    header: PartHeader | None


def _slots(*parts: tuple[int, ...] | None) -> list[_Slot]:
    return [_Slot(number, None if part is None else _part(*part)) for number, part in enumerate(parts)]


def _numbers(slots: Iterable[_Slot]) -> list[int]:
    return [slot.number for slot in slots]


@pytest.mark.parametrize(
    ("slots", "generation", "restored", "stays"),
    [
        ([], 1, None, None),
        ([None, None], 1, None, None),
        ([(1, 4), None], 1, None, (1, 4)),
        ([(1, 4), (1, 5)], 1, None, (1, 5)),
        ([(1, 11), (1, 10)], 2, (1, 10), (1, 10)),  # rolled back: not every rank has step 11, so it may go
        ([(2, 11), (1, 10)], 2, (1, 10), (2, 11)),  # the new generation has one of its own
        ([(2, 11), (1, 40)], 2, (1, 10), (2, 11)),  # more steps, but of a generation that was rolled back
        ([(1, 11), (1, 10)], 2, None, (1, 11)),  # restored from storage
        ([(1, 11), (1, 10)], 2, (1, 9), (1, 11)),  # restored from a part in another process
        ([(1, 3), (2, 5), (3, 7)], 4, (2, 5), (2, 5)),
    ],
)
def test_own_slot_that_must_stay(
    slots: list[tuple[int, int] | None],
    generation: int,
    restored: tuple[int, int] | None,
    stays: tuple[int, int] | None,
) -> None:
    kept = retention.kept(_slots(*slots), generation=generation, restored=restored)
    assert (None if kept is None else slots[kept.number]) == stays


def test_of_two_parts_of_the_same_step_the_later_one_stays() -> None:
    first, second = _part(1, 5), PartHeader(8, 1, 0, 1, 5, 0, 0, 0, 0, 0, 0)
    assert retention.kept([_Slot(0, second), _Slot(1, first)], generation=1, restored=None) == _Slot(0, second)


def test_incomplete_slots_are_overwritten_first_then_the_oldest() -> None:
    slots = _slots((2, 1), (1, 9), None, (1, 8), (3, 1))
    assert _numbers(retention.overwritable(slots, generation=3, restored=None, held=())) == [2, 3, 1, 0]


def test_held_slots_are_not_overwritten() -> None:
    slots = _slots((1, 6), (1, 7), None, (1, 8))
    held = (slots[0], slots[2])
    assert _numbers(retention.overwritable(slots, generation=1, restored=None, held=held)) == [1]


@pytest.mark.parametrize(
    ("has_copy", "num_since_sent", "num_slots"), [(False, 1, 3), (False, 9, 3), (True, 1, 3), (True, 2, 4)]
)
def test_a_fourth_slot_is_needed_only_if_some_snapshots_are_not_sent(
    has_copy: bool, num_since_sent: int, num_slots: int
) -> None:
    assert retention.num_own_slots(has_copy=has_copy, num_since_sent=num_since_sent) == num_slots


def test_live_slot_that_the_group_was_restored_from_is_not_reused() -> None:
    slots = _slots((1, 10), (1, 9), None)
    assert _numbers(retention.reusable_live(slots, restored=(1, 10))) == [1, 2]
    assert _numbers(retention.reusable_live(slots, restored=None)) == [0, 1, 2]


def test_next_copy_of_a_rank_replaces_its_older_copy_before_it_takes_an_empty_slot() -> None:
    slots = _slots((1, 4, 7), None, (1, 5, 7), (1, 4, 8))
    assert _numbers(retention.reusable_for_copy(slots, generation=1, rank=7)) == [0, 1]


def test_single_copy_of_a_rank_and_copies_of_other_generations_are_not_replaced() -> None:
    slots = _slots((2, 4, 7), (1, 2, 7), (1, 3, 7), None)
    assert _numbers(retention.reusable_for_copy(slots, generation=2, rank=7)) == [3]


def test_the_copy_of_a_step_of_which_every_rank_has_one_is_not_replaced() -> None:
    slots = _slots((1, 4, 7), (1, 8, 7))
    assert _numbers(retention.reusable_for_copy(slots, generation=1, rank=7, keep_step=8)) == [0]
    assert _numbers(retention.reusable_for_copy(slots, generation=1, rank=7, keep_step=4)) == [1]


def test_two_empty_buddy_slots_stay_allocated() -> None:
    assert _numbers(retention.surplus_empty(_slots(None, (1, 1), None, None, None))) == [3, 4]
    assert _numbers(retention.surplus_empty(_slots(None, (1, 1), None))) == []


def test_parts_of_earlier_generations_and_incomplete_parts_are_outdated() -> None:
    assert retention.is_outdated(None, before=2)
    assert retention.is_outdated(_part(1, 99), before=2)
    assert not retention.is_outdated(_part(2, 1), before=2)
