"""Runtime environments of Ray for the processes of an attempt, which are forked from their node's fork server.

Called by `gateway/ray_cluster.py` for the supervisor, by `ray_fleet` for the workers and the agents
of their nodes. All get the same settings of libraries, because a node has one fork server for each combination of them
(`shoal_workers/forkserver/launch.py`).
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from ray.runtime_env import RuntimeEnv

import shoal_service
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.forkserver import PATIENCE, PATIENCE_S, PRELOAD, preload, py_executable
from shoal_workers.libc_tunables import choose_tunables

_SUPERVISOR = "shoal_service.supervisor.actor"
RESERVED_S = 600.0
"""How long a process waits for the next supervisor."""


def supervisor_environment(config: SupervisorConfig) -> dict[str, Any]:
    """Environment of a supervisor. It is forked also if the workers have GPUs, because a supervisor uses no device. The
    first one of a node starts the fork server, and does not wait for it."""
    environment = _make_environment(config, threads=1, fork=True, if_warm=True)
    environment["env_vars"][PATIENCE] = f"{RESERVED_S:g}"
    return environment


def worker_environment(config: SupervisorConfig) -> dict[str, Any]:
    """Environment of a worker. Ray adds what the supervisor's environment has and this one has not.

    CUDA does not survive a fork. That importing everything does not initialize it was not verified on a GPU, so workers
    with GPUs are interpreters.
    """
    worker = config.spec.worker
    environment = _make_environment(config, threads=max(1, int(worker.cpus)), fork=not worker.gpus)
    environment["env_vars"][PATIENCE] = f"{PATIENCE_S:g}"
    environment["env_vars"] |= config.spec.code.env
    if config.code_uri is not None:
        environment["working_dir"] = config.code_uri
    return environment


def agent_environment(config: SupervisorConfig) -> dict[str, Any]:
    """Environment of an agent that polls the workers of a node. It is forked where the workers are, because the server
    is there then."""
    environment = _make_environment(config, threads=1, fork=not config.spec.worker.gpus, if_warm=True)
    environment["env_vars"][PATIENCE] = f"{PATIENCE_S:g}"
    return environment


def serialized_supervisor_environment(config: SupervisorConfig) -> str:
    """The environment as Ray writes it for the actor. A process that is started in advance has exactly this one."""
    return str(RuntimeEnv(**supervisor_environment(config)).serialize())


def serialized_worker_environment(config: SupervisorConfig) -> str:
    """The environment of a worker as Ray writes it. Ray's core writes it without spaces, from the environments of
    supervisor and worker."""
    of_supervisor, of_worker = supervisor_environment(config), worker_environment(config)
    merged = {**of_supervisor, **of_worker, "env_vars": {**of_supervisor["env_vars"], **of_worker["env_vars"]}}
    return json.dumps(merged, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _make_environment(config: SupervisorConfig, *, threads: int, fork: bool, if_warm: bool = False) -> dict[str, Any]:
    env_vars = {"OMP_NUM_THREADS": str(threads)}
    if not config.spec.worker.gpus:
        env_vars |= choose_tunables(os.environ)
    environment: dict[str, Any] = {"env_vars": env_vars}
    if config.fork_workers and (executable := py_executable(fork=fork, if_warm=if_warm)) is not None:
        environment["py_executable"] = executable
        env_vars[PRELOAD] = _list_preloaded()
    return environment


@cache
def _list_preloaded() -> str:
    """What the fork server imports: also the supervisor, whose imports would take most of its start."""
    return preload(_SUPERVISOR, Path(shoal_service.__path__[0]))
