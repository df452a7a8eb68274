"""How the processes of an attempt start: forked from their node's fork server, as runtime environments of Ray.

Called by `control/ray_process/ray_cluster.py` for the supervisor and by `ray_fleet` for the workers. Both get the same
settings of libraries, because a node has one fork server for each combination of them
(`shoal_workers/forkserver/launch.py`).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import shoal_service
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.forkserver import PRELOAD, preload, py_executable

_SUPERVISOR = "shoal_service.supervisor.actor"
_TUNABLES = "GLIBC_TUNABLES"
_COPY_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""A snapshot consists of some hundred copies of this size or more, which are not read soon. Copying past the cache
takes less time."""


def supervisor_environment(config: SupervisorConfig) -> dict[str, Any]:
    """Also forked if the workers have GPUs: a supervisor uses no device. The first one of a node starts the fork
    server, and does not wait for it."""
    return _environment(config, threads=1, fork=True, if_warm=True)


def worker_environment(config: SupervisorConfig) -> dict[str, Any]:
    """Ray adds what the supervisor's environment has and this one has not.

    CUDA does not survive a fork. That importing everything does not initialize it was not verified on a GPU, so workers
    with GPUs are interpreters.
    """
    worker = config.spec.worker
    found = _environment(config, threads=max(1, int(worker.cpus)), fork=not worker.gpus)
    if config.code_uri is not None:
        found["working_dir"] = config.code_uri
    return found


def _environment(config: SupervisorConfig, *, threads: int, fork: bool, if_warm: bool = False) -> dict[str, Any]:
    env_vars = {"OMP_NUM_THREADS": str(threads)}
    if not config.spec.worker.gpus and _TUNABLES not in os.environ:
        env_vars[_TUNABLES] = _COPY_PAST_THE_CACHE
    found: dict[str, Any] = {"env_vars": env_vars}
    if config.fork_workers and (executable := py_executable(fork=fork, if_warm=if_warm)) is not None:
        found["py_executable"] = executable
        env_vars[PRELOAD] = _preloaded()
    return found


@cache
def _preloaded() -> str:
    """The fork server also imports the supervisor, whose imports would take most of its start."""
    return preload(_SUPERVISOR, Path(shoal_service.__path__[0]))
