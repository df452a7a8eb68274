"""Which memory a process sees: equal for processes whose snapshots lie in the same files of shared memory.

Several Ray nodes may share a machine. If one of them ends, what its workers kept there can be read by the others, at
once. A container with a shared memory of its own counts as a machine. Called by the worker's actor.
"""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id(root: Path = Path("/dev/shm")) -> str:
    """The boot of the machine, and the file system that is mounted at `root`. OSError if there is none."""
    boot = _BOOT_ID.read_text().strip()
    return f"{boot}-{root.stat().st_dev:x}"
