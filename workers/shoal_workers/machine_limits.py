"""How many cores and how much memory this process may use: what the machine has, and what its control groups allow.

Hidden here: where control groups are, in both versions, and how their limits are written.

    v2   <mount>/<path>/cpu.max              one tree for everything
         <mount>/<path>/memory.max           memory.current          inactive_file of memory.stat
    v1   <mount>/cpu/<path>/cpu.cfs_quota_us, cpu.cfs_period_us      a tree per controller
         <mount>/memory/<path>/memory.limit_in_bytes  memory.usage_in_bytes  total_inactive_file of memory.stat

A limit of any group above also counts, so all groups from that of the process up to the mount are read. In a container
the group's path may not exist below the mount, since only the container's own part of the tree is mounted: then the
mount itself is the container's group. Pages of files that are not in use can be dropped and do not count as used.
Called by the engine, the worker's actor, `data.prepare` and the server that starts a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, MOUNT = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def allowed_cores(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Cores that this process may use, by its affinity and by quotas; at least one, and a quota of 2.5 cores is 2.

    Args:
        proc, mount: where the file systems of processes and of control groups are mounted.
    """
    quotas = [quota for group in groups_of("cpu", proc, mount) if (quota := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(group: ControlGroup) -> float | None:
    """Cores; None if the group is not there, or has no limit."""
    with suppress(OSError, ValueError):
        if group.is_v2:
            quota, period = (group.directory / "cpu.max").read_text().split()
        else:
            quota = (group.directory / "cpu.cfs_quota_us").read_text()
            period = (group.directory / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:  # "max" is a ValueError, -1 no limit
            return int(quota) / int(period)
    return None


def available_bytes(proc: Path = PROC, cgroups: Path = MOUNT) -> int:
    """Memory that this process may still take. Arguments as of `allowed_cores`."""
    return min([_of_machine(proc, "MemAvailable:"), *_left_in_groups(proc, cgroups)])


def total_bytes(proc: Path = PROC, cgroups: Path = MOUNT) -> int:
    """What all processes here may take together: the machine's memory, or less if a control group limits it."""
    return min([_of_machine(proc, "MemTotal:"), *(limit for _, limit in _limits(proc, cgroups))])


def _of_machine(proc: Path, key: str) -> int:
    lines = (proc / "meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(key)), 0)


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[ControlGroup, int]]:
    """Yield the groups with a limit of memory, and the limits in bytes."""
    for group in groups_of("memory", proc, cgroups):
        limit = group.directory / ("memory.max" if group.is_v2 else "memory.limit_in_bytes")
        with suppress(OSError, ValueError):  # it is not there; "max" is a ValueError
            if (num_bytes := int(limit.read_text())) < _UNLIMITED:
                yield group, num_bytes


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    for group, limit in _limits(proc, cgroups):
        used = group.directory / ("memory.current" if group.is_v2 else "memory.usage_in_bytes")
        droppable = "inactive_file" if group.is_v2 else "total_inactive_file"
        with suppress(OSError, ValueError):
            stat = dict(line.split() for line in (group.directory / "memory.stat").read_text().splitlines())
            yield max(0, limit - max(0, int(used.read_text()) - int(stat.get(droppable, 0))))


@dataclass(frozen=True, slots=True)
class ControlGroup:
    directory: Path
    is_v2: bool


def groups_of(controller: str, proc: Path = PROC, mount: Path = MOUNT) -> Iterator[ControlGroup]:
    """Groups that may limit what `controller` ("memory", "cpu") controls. They need not exist."""
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            yield from (ControlGroup(directory, is_v2=True) for directory in _up(mount, path))
        elif controller in controllers.split(","):
            yield from (ControlGroup(directory, is_v2=False) for directory in _up(mount / controller, path))


def _up(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group, and every group above it as far as the mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])
