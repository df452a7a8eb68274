"""Processes that see the same memory have the same machine id."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_workers.snapshot_store.machine import machine_id


def test_the_id_is_of_this_boot_and_of_the_file_system() -> None:
    assert machine_id(Path("/dev/shm")) == machine_id(Path("/dev/shm"))
    assert machine_id(Path("/dev/shm")) != machine_id(Path("/proc"))


def test_a_machine_without_shared_memory_has_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such place"):
        machine_id(tmp_path / "no such place")
