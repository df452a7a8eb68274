"""The ring of log entries: what may be overwritten, and what happens when there is no room."""

from pathlib import Path

import pytest

from shoal_workers.snapshot_store.slots.buddy_slots import MAX_ENTRIES, EntrySlots, OutdatedCopy
from shoal_workers.snapshot_store.slots.retention import reusable_for_entry
from shoal_workers.snapshot_store.slots.slot_files import PartHeader, Regions, Stamp

REGIONS = Regions.of(index_bytes=10, extra_room=100, num_bytes=1000)


def _header(step: int, *, generation: int = 1, rank: int = 0) -> PartHeader:
    return PartHeader(2, generation, rank, 2, step, 0, 0, 0, 0, 0, 0)


@pytest.fixture
def slots(tmp_path: Path) -> EntrySlots:
    return EntrySlots(tmp_path)


def _add(slots: EntrySlots, step: int, *, newest_copy: int | None = None, generation: int = 1, rank: int = 0) -> bool:
    slot = slots.acquire(REGIONS, generation=generation, rank=rank, newest_copy=newest_copy)
    if slot is None:
        return False
    slot.finish(REGIONS, Stamp(generation, rank, 2, step), num_extra_bytes=0)
    slots.release(slot)
    return True


def _steps(slots: EntrySlots) -> list[int]:
    return sorted(slot.header.step for slot in slots._pool.slots if slot.header is not None)


def test_entries_well_before_the_newest_copy_are_unnecessary_oldest_first() -> None:
    headers = [_header(9), None, _header(7), _header(8), _header(6, rank=1), _header(5, generation=2)]
    assert reusable_for_entry(headers, generation=1, rank=0, newest_copy=11) == [1, 2, 3]
    assert reusable_for_entry(headers, generation=1, rank=0, newest_copy=None) == [1]


def test_the_ring_grows_to_its_limit_and_then_waits_for_a_copy(slots: EntrySlots) -> None:
    for step in range(1, MAX_ENTRIES + 1):
        assert _add(slots, step)
    assert not _add(slots, MAX_ENTRIES + 1)
    assert _add(slots, 1, rank=1), "every rank has a ring of its own"
    assert _add(slots, MAX_ENTRIES + 1, newest_copy=20)
    assert min(_steps(slots)) == 1, "that of the other rank"
    assert 2 in _steps(slots)
    assert len(_steps(slots)) == MAX_ENTRIES + 1


def test_entries_of_earlier_generations_are_dropped_and_refused(slots: EntrySlots) -> None:
    assert _add(slots, 1)
    held = slots.acquire(REGIONS, generation=1, rank=0, newest_copy=None)
    assert held is not None
    slots.drop_older(2)
    assert _steps(slots) == []
    assert slots.is_outdated(1)
    with pytest.raises(OutdatedCopy, match="generation 1 is over"):
        _add(slots, 2)
    held.finish(REGIONS, Stamp(1, 0, 2, 2), num_extra_bytes=0)
    slots.release(held)
    assert _steps(slots) == [], "it was received while its generation was dropped"
    assert _add(slots, 3, generation=2)


def test_without_shared_memory_there_is_no_slot(slots: EntrySlots) -> None:
    huge = Regions.of(index_bytes=10, extra_room=100, num_bytes=1 << 60)
    assert slots.acquire(huge, generation=1, rank=0, newest_copy=None) is None
