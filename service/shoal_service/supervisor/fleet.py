"""Fleet: the shard processes of one attempt as Ray actors. Starts, finds, calls and kills them; decides nothing."""

from __future__ import annotations

from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

import ray
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.actor import CONCURRENCY_GROUPS, ShardActor
from shoal_workers.contract.ids import NAMESPACE
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Assignment, ErrorReport, ShardConfig, ShardExit, ShardInfo, ShardPoll

_GIB = 1 << 30


class Fleet:
    """Handles by process index. Called on the executor's loop only."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._handles: dict[int, ActorHandle] = {}
        worker = config.spec.worker
        env_vars = {"OMP_NUM_THREADS": str(max(1, int(worker.cpus)))}
        runtime_env: dict[str, Any] = {"env_vars": env_vars}
        if config.code_uri is not None:
            runtime_env["working_dir"] = config.code_uri
        self._options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": worker.cpus,
            "num_gpus": worker.gpus,
            "runtime_env": runtime_env,
        }
        if worker.memory_gib:
            self._options["memory"] = int(worker.memory_gib * _GIB)
        self._actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(ShardActor)

    def start(self, index: int, shard_id: str) -> None:
        """Ask Ray for the process; it may wait for resources, and the first call to it says when it is there."""
        config = self._config
        self._handles[index] = self._actor_class.options(name=shard_id, **self._options).remote(
            config.spec,
            ShardConfig(
                job_id=config.job_id,
                attempt=config.attempt,
                shard_id=shard_id,
                checkpoint_root=config.checkpoint_root,
                memory_key=config.memory_key,
            ),
        )

    def find(self, index: int, shard_id: str) -> bool:
        """Re-attach by name, after the supervisor's own death. False: it is gone."""
        try:
            self._handles[index] = ray.get_actor(shard_id, namespace=NAMESPACE)
        except ValueError:
            return False
        return True

    async def prepare(self, index: int) -> ShardInfo | ErrorReport:
        answer: ShardInfo | ErrorReport = await self._handles[index].prepare.remote()
        return answer

    async def run(self, index: int, assignment: Assignment) -> ShardExit:
        answer: ShardExit = await self._handles[index].run.remote(assignment)
        return answer

    async def join(self, index: int, generation: int) -> ShardExit:
        answer: ShardExit = await self._handles[index].join.remote(generation)
        return answer

    async def poll(self, index: int, after: int, acknowledged: int, wait_s: float) -> ShardPoll:
        answer: ShardPoll = await self._handles[index].poll.remote(after, acknowledged, wait_s)
        return answer

    async def interrupt(self, index: int, generation: int) -> None:
        await self._handles[index].interrupt.remote(generation)

    async def request_yield(self, index: int, generation: int, durable: bool) -> None:
        await self._handles[index].request_yield.remote(generation, durable)

    def knows(self, index: int) -> bool:
        """It was started or found, and not lost since."""
        return index in self._handles

    def kill(self, index: int) -> None:
        handle = self._handles.pop(index, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    def forget(self, index: int) -> None:
        """The process is known to be gone."""
        self._handles.pop(index, None)


def cause_of(error: RayActorError) -> IncidentCause:
    """What Ray says took the process: its node, or only itself. Ray tells the two apart in words only."""
    words = str(error).lower()
    by_node = any(phrase in words for phrase in ("its node has died", "node was terminated", "node died"))
    return IncidentCause.NODE_DIED if by_node else IncidentCause.SHARD_DIED
