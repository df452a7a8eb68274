"""Peers' live slots are mapped ahead and show what is written later; maps of removed files are dropped."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal_workers.snapshot_store.slots.registry import SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import PAGE_BYTES, SlotFile
from shoal_workers.snapshot_store.transfer.peer_maps import PeerMaps

_BYTES = 4 * PAGE_BYTES
_SOON_S = 30.0


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[[str], SlotRegistry]]:
    with ExitStack() as stack:

        def make(worker_id: str) -> SlotRegistry:
            registry = SlotRegistry(tmp_path, job_id="job", attempt=1, memory_id="n", worker_id=worker_id)
            stack.callback(registry.close)
            return registry

        yield make


@pytest.fixture
def maps(join: Callable[[str], SlotRegistry]) -> Iterator[PeerMaps]:
    found = PeerMaps(join("reader"))
    yield found
    found.close()


@pytest.fixture
def peer(join: Callable[[str], SlotRegistry]) -> Path:
    return join("peer").path


def _found(maps: PeerMaps, slot: SlotFile, num_bytes: int = _BYTES, own: tuple[SlotFile, ...] = ()) -> object:
    fd = os.open(slot.path, os.O_RDONLY)
    try:
        return maps.find(fd, num_bytes, own)
    finally:
        os.close(fd)


def _mapped(maps: PeerMaps) -> PeerMaps:
    maps.map_ahead()
    assert maps.wait(_SOON_S)
    return maps


def test_a_map_shows_what_its_owner_writes_later(maps: PeerMaps, peer: Path) -> None:
    slot = SlotFile(peer / "own-live-1", _BYTES)
    assert _found(maps, slot) is None
    memory = _found(_mapped(maps), slot)
    assert isinstance(memory, type(slot.map))
    slot.map[PAGE_BYTES : PAGE_BYTES + 5] = b"later"
    assert memory[PAGE_BYTES : PAGE_BYTES + 5] == b"later"
    assert maps.num_bytes == _BYTES


def test_only_live_slots_of_others_are_mapped(maps: PeerMaps, peer: Path) -> None:
    SlotFile(peer / "own-1", _BYTES)
    SlotFile(peer / "buddy-1", _BYTES)
    assert _mapped(maps).num_bytes == 0


def test_a_slot_of_this_process_is_found_in_its_own_map(maps: PeerMaps, tmp_path: Path) -> None:
    slot = SlotFile(tmp_path / "own-live-1", _BYTES)
    assert _found(maps, slot, own=(slot,)) is slot.map
    assert _found(maps, slot, 2 * _BYTES, own=(slot,)) is None


def test_a_slot_that_has_grown_is_mapped_again(maps: PeerMaps, peer: Path) -> None:
    slot = SlotFile(peer / "own-live-1", _BYTES)
    _mapped(maps)
    slot.grow(2 * _BYTES)
    assert _found(maps, slot, 2 * _BYTES) is None
    assert _found(_mapped(maps), slot, 2 * _BYTES) is not None
    assert maps.num_bytes == 2 * _BYTES


def test_memory_that_a_slot_has_given_back_is_not_touched(maps: PeerMaps, peer: Path) -> None:
    slot = SlotFile(peer / "own-live-1", 16 * _BYTES)
    slot.resize(_BYTES)
    if slot.capacity_bytes != _BYTES:
        pytest.skip("this filesystem gives no memory back")
    before = slot.path.stat().st_blocks
    assert _mapped(maps).num_bytes == 512 * before
    assert slot.path.stat().st_blocks == before


def test_maps_of_removed_files_are_dropped(maps: PeerMaps, peer: Path) -> None:
    first, second = (SlotFile(peer / f"own-live-{number}", _BYTES) for number in (1, 2))
    assert _mapped(maps).num_bytes == 2 * _BYTES
    first.remove()
    assert _mapped(maps).num_bytes == _BYTES
    assert _found(maps, second) is not None


def test_dropped_maps_are_not_found(maps: PeerMaps, peer: Path) -> None:
    slot = SlotFile(peer / "own-live-1", _BYTES)
    _mapped(maps)
    assert maps.drop()
    assert not maps.drop()
    assert _found(maps, slot) is None
