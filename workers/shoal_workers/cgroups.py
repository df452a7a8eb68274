"""The control groups of this process, from its own up to the mount: a limit of any of them counts.

    v2   <mount>/<path>               one tree for everything
    v1   <mount>/<controller>/<path>  a tree per controller

In a container the group's path may not exist below the mount, since only the container's own part of the tree is
mounted: then the mount itself is the container's group. Called by `memory_limit` and by `cores`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, MOUNT = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    directory: Path
    is_v2: bool


def groups_of(controller: str, proc: Path = PROC, mount: Path = MOUNT) -> Iterator[ControlGroup]:
    """Those that may limit what `controller` ("memory", "cpu") controls. They need not exist."""
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
    """The group, and every group above it as far as the mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])
