"""A slot is a part only between `finish` and the next `begin`. Missing memory raises an error and never a signal."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_workers.snapshot_store.slots.slot_files import (
    PAGE_BYTES,
    PartHeader,
    Regions,
    SlotFile,
    Stamp,
    read_header,
    read_sequence,
)
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull

_REGIONS = Regions.of(index_bytes=10, extra_room=100, num_bytes=5000)


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


def test_new_slot_holds_no_part(slot: SlotFile) -> None:
    assert slot.header is None
    assert _read(slot.path) is None


def test_a_finished_part_is_read_as_it_was_written(slot: SlotFile) -> None:
    _finish(slot)
    found = _read(slot.path)
    assert found is not None
    assert found == slot.header
    assert (found.generation, found.rank, found.world_size, found.step, found.num_bytes) == (3, 1, 4, 7, 5000)


def test_a_slot_holds_no_part_while_it_is_overwritten(slot: SlotFile) -> None:
    _finish(slot)
    slot.begin()
    assert slot.header is None
    assert _read(slot.path) is None


def test_every_part_has_a_new_sequence_number(slot: SlotFile) -> None:
    seen = set()
    for _ in range(3):
        slot.begin()
        _finish(slot)
        assert slot.header is not None
        seen.add(slot.header.sequence)
    assert len(seen) == 3
    assert all(sequence % 2 == 0 for sequence in seen)


def test_payload_is_page_aligned_and_regions_do_not_overlap() -> None:
    for index_bytes, extra_room in [(0, 0), (1, 1), (5000, 70_000)]:
        regions = Regions.of(index_bytes=index_bytes, extra_room=extra_room, num_bytes=3)
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
        Regions.of(index_bytes=10, extra_room=100, num_bytes=1 << 40), Stamp(1, 0, 1, step=1), num_extra_bytes=0
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
