"""How much memory this process may still take: the least of what the machine has left and what its cgroups allow.

    cgroup v2   <mount>/<path>/memory.max            memory.current          inactive_file of memory.stat
    cgroup v1   <mount>/<path>/memory.limit_in_bytes memory.usage_in_bytes   total_inactive_file of memory.stat

A limit of any group above also counts, so all groups from that of the process up to the mount are read. Pages of files
that are not in use can be dropped and do not count as used. Called by `warm_memory`, by the
build of a whole model, and by the actor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal_workers.cgroups import MOUNT, PROC, groups_of

_UNLIMITED = 1 << 62


def available_bytes(proc: Path = PROC, cgroups: Path = MOUNT) -> int:
    """`proc`, `cgroups`: where these file systems are mounted."""
    lines = (proc / "meminfo").read_text().splitlines()
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return min([machine, *_left_in_groups(proc, cgroups)])


def total_bytes(proc: Path = PROC, cgroups: Path = MOUNT) -> int:
    """What all processes here may take together: the machine's memory, or less if a control group limits it."""
    lines = (proc / "meminfo").read_text().splitlines()
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")), 0)
    return min([machine, *_limits(proc, cgroups)])


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    for group in groups_of("memory", proc, cgroups):
        limit = group.directory / ("memory.max" if group.is_v2 else "memory.limit_in_bytes")
        with suppress(OSError, ValueError):  # it is not there; "max" is a ValueError
            if (num_bytes := int(limit.read_text())) < _UNLIMITED:
                yield num_bytes


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    for group in groups_of("memory", proc, cgroups):
        if group.is_v2:
            yield from _left(group.directory, "memory.max", "memory.current", "inactive_file")
        else:
            yield from _left(group.directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit: str, used: str, droppable: str) -> Iterator[int]:
    """Nothing if the group is not there or has no limit."""
    try:
        limit_text = (group / limit).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return
        used_bytes = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(0, int(limit_text) - max(0, used_bytes - int(stat.get(droppable, 0))))
    except (OSError, ValueError):
        return
