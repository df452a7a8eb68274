"""How much memory this process may still take: the least of what the machine has left and what its cgroups allow.

    cgroup v2   <mount>/<path>/memory.max            memory.current          inactive_file of memory.stat
    cgroup v1   <mount>/<path>/memory.limit_in_bytes memory.usage_in_bytes   total_inactive_file of memory.stat

A limit of any group above also counts, so all groups from that of the process up to the mount are read. Pages of files
that are not in use can be dropped and do not count as used. In a container the group's path may not exist below the
mount, since only the container's own part of the tree is mounted: then the mount itself is the container's group.
Called by `warm_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 62


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """`proc`, `cgroups`: where these file systems are mounted."""
    lines = (proc / "meminfo").read_text().splitlines()
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return min([machine, *_left_in_groups(proc, cgroups)])


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:  # v2
            for group in _up(cgroups, path):
                yield from _left(group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for group in _up(cgroups / "memory", path):
                yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _up(mount: Path, path: str) -> Iterator[Path]:
    """The group, and every group above it as far as the mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


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
