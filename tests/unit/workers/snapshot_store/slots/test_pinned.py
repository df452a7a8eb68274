"""Slots of a state on a GPU are registered with its driver while they are used, and never longer than their memory."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal_workers.snapshot_store.slots.own_slots import OwnSlots, find_host_runtime
from shoal_workers.snapshot_store.slots.slot_files import Stamp


class _Driver:
    """Knows what is registered, and refuses what the runtime would refuse."""

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        self.registered: dict[int, int] = {}
        self.late: list[int] = []
        """Addresses that were unregistered when their memory was gone."""
        self._most_bytes = most_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> int:  # noqa: N802
        ends = [(start, start + size) for start, size in self.registered.items()]
        if num_bytes > self._most_bytes or any(a < address + num_bytes and address < b for a, b in ends):
            return 712
        assert not address % 4096
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int, /) -> int:  # noqa: N802
        del self.registered[address]
        mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        if not any(int(start, 16) <= address < int(end, 16) for start, end in mapped):
            self.late.append(address)
        return 0


def _write(slots: OwnSlots, state: dict[str, torch.Tensor], step: int) -> None:
    slots.write(state, Stamp(1, 0, 1, step), {}, owns_replicated=True)


def test_both_slots_are_registered_once_whatever_is_written(tmp_path: Path) -> None:
    driver = _Driver()
    slots = OwnSlots(tmp_path, find_runtime=lambda _: driver)
    state = {"a": torch.arange(5000.0)}
    for step in range(1, 6):
        _write(slots, state, step)
    assert list(driver.registered.values()) == [20_000, 20_000]
    slots.close()
    assert (driver.registered, driver.late) == ({}, [])


def test_a_state_of_another_size_has_its_own_registration(tmp_path: Path) -> None:
    """A slot that grows has another address, and one that shrinks gives pages back."""
    driver = _Driver()
    slots = OwnSlots(tmp_path, find_runtime=lambda _: driver)
    for step, size in enumerate((5000, 900_000, 5000, 6000), start=1):
        _write(slots, {"a": torch.full((size,), float(step))}, step)
        assert 4 * size in driver.registered.values()
    assert len(driver.registered) == 2
    slots.close()
    assert (driver.registered, driver.late) == ({}, [])


def test_a_driver_that_refuses_costs_no_snapshot(tmp_path: Path) -> None:
    driver = _Driver(most_bytes=100)
    slots = OwnSlots(tmp_path, find_runtime=lambda _: driver)
    _write(slots, {"a": torch.arange(5000.0)}, 3)
    assert driver.registered == {}
    assert slots.holds(1, 3)
    slots.close()


def test_a_state_on_the_host_needs_no_registration() -> None:
    assert find_host_runtime({"a": torch.zeros(3)}) is None
