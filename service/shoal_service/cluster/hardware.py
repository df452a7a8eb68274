"""What this machine has for an embedded cluster: CPUs that this process may use, and NVIDIA GPUs that it sees.

Read once, before the cluster starts; `shoal serve` asks. Settings win over what is found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_service.problems import SettingsError
from shoal_workers.machine_limits import MOUNT, PROC, allowed_cores

_GPU = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class Hardware:
    cpus: int
    gpus: int


def find(environment: Mapping[str, str], dev: Path = Path("/dev"), proc: Path = PROC, mount: Path = MOUNT) -> Hardware:
    return Hardware(cpus=allowed_cores(proc, mount), gpus=_count_gpus(environment, dev))


def require_cpus(nodes: int, cpus: int, *, found: bool) -> None:
    """Checks that there is a CPU for each node. Raises SettingsError. `found`: the CPUs were found on this machine, not
    set."""
    if nodes > cpus:
        where = "this machine has" if found else "--num-cpus gives"
        raise SettingsError(
            f"--nodes {nodes} needs a CPU for each node, and {where} {cpus}. Use at most {cpus} nodes, or --num-cpus "
            f"{nodes}: the scheduler counts CPUs, and may count more than the machine has."
        )


def _count_gpus(environment: Mapping[str, str], dev: Path) -> int:
    """Number of the NVIDIA driver's devices, and no more than CUDA_VISIBLE_DEVICES lets the workers see."""
    try:
        present = sum(_GPU.fullmatch(entry.name) is not None for entry in dev.iterdir())
    except OSError:
        present = 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [device.strip() for device in visible.split(",")]
    until_invalid = next(
        (at for at, device in enumerate(named) if not device or device == "-1"), len(named)
    )  # as CUDA does
    return min(present, until_invalid)
