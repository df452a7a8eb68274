"""WorkerUse: what a worker's process and its host use. Measured in the worker, sent with its polls, shown as metrics.

No decision depends on it.
"""

from __future__ import annotations

from shoal_workers.contract.base import Frozen


class WorkerUse(Frozen):
    """One measurement. Sizes are of whole filesystems and devices, which other processes may share."""

    at: float
    """Wall-clock time, seconds since the epoch. It stands still if a filesystem does not answer."""
    cpu_cores: float | None = None
    """CPUs that the process kept busy since the measurement before; null: this is the first."""
    resident_bytes: int = 0
    shm_bytes: int = 0
    """Size of /dev/shm, where snapshots are; 0: there is none."""
    shm_free_bytes: int = 0
    disk_bytes: int = 0
    """Size of the filesystem of the checkpoints, or of temporary files if the checkpoints are not on one."""
    disk_free_bytes: int = 0
    gpu_bytes: int = 0
    """Memory of the worker's GPU; 0: it has none."""
    gpu_free_bytes: int = 0
    gpu_busy: float | None = None
    """Share of the time in which the GPU ran a kernel; null: not measured (package nvidia-ml-py)."""
