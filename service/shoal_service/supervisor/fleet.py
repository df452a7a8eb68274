"""Fleet: the shard workers of one attempt as Ray actors. Starts, finds, calls and kills them; decides nothing.

What may wait for the Ray head (creating an actor does, and killing one may) runs on threads of its own: while the head
is away, the executor must go on with what lives.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

import ray
from shoal_service.planner import plan
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.actor import CONCURRENCY_GROUPS, WorkerActor, is_worker_process
from shoal_workers.contract.ids import NAMESPACE
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Assignment, ErrorReport, WorkerConfig, WorkerExit, WorkerInfo, WorkerPoll
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.forkserver import py_executable

_GIB = 1 << 30
_NUM_THREADS = 8
_TUNABLES = "GLIBC_TUNABLES"
_COPY_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""A snapshot is some hundred copies of this size or more that nobody reads soon: past the cache, they take less."""
_KILL_S = 0.3
"""Ray's own kill takes some tens of milliseconds; a worker that is stopped does not hear it."""
_TERMINATE_S = 2.0
_RETIRE_S = 2.0
"""A kill goes through the head, and one that was lost there has left a worker behind: so it is told itself, too."""


class Fleet:
    """Handles by worker index. Called on the executor's loop only."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._handles: dict[int, ActorHandle] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._creating: dict[int, Future[ActorHandle]] = {}
        self._creators = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="create")
        self._killers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kill")
        self._node_id: str = ray.get_runtime_context().get_node_id()
        worker = config.spec.worker
        env_vars = {"OMP_NUM_THREADS": str(max(1, int(worker.cpus)))}
        if not worker.gpus and _TUNABLES not in os.environ:
            env_vars[_TUNABLES] = _COPY_PAST_THE_CACHE
        runtime_env: dict[str, Any] = {"env_vars": env_vars}
        if config.code_uri is not None:
            runtime_env["working_dir"] = config.code_uri
        # CUDA does not survive a fork, and that importing everything leaves it alone has not been shown on a GPU.
        if config.fork_workers and (executable := py_executable(fork=not worker.gpus)) is not None:
            runtime_env["py_executable"] = executable
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
        self._rank_bytes = 0 if worker.gpus else _rank_bytes(config)
        self._actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)

    async def start(self, index: int, worker_id: str, avoid_nodes: tuple[str, ...], only_on: str) -> None:
        """Ask Ray for the worker; it may wait for resources, and the first call to it says when it is there."""
        creating = self._creating[index] = self._creators.submit(self._create, worker_id, avoid_nodes, only_on)
        try:
            handle = await asyncio.shield(asyncio.wrap_future(creating))
        except RayError:
            self._creating.pop(index, None)
            raise
        self._creating.pop(index, None)  # not where this is cancelled: Ray may yet create it, and `kill` follows
        self._handles[index] = handle

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        """Re-attach by name, after the supervisor's own death. False: it is gone."""
        try:
            self._handles[index] = ray.get_actor(worker_id, namespace=NAMESPACE)
        except ValueError:
            return False
        if info is not None:
            self._infos[index] = info
        return True

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport:
        answer: WorkerInfo | ErrorReport = await self._handles[index].prepare.remote()
        if isinstance(answer, WorkerInfo):
            self._infos[index] = answer
        return answer

    async def run(self, index: int, assignment: Assignment) -> WorkerExit:
        answer: WorkerExit = await self._handles[index].run.remote(assignment)
        return answer

    async def join(self, index: int, generation: int) -> WorkerExit:
        answer: WorkerExit = await self._handles[index].join.remote(generation)
        return answer

    async def poll(self, index: int, after: int, acknowledged: int, wait_s: float) -> WorkerPoll:
        answer: WorkerPoll = await self._handles[index].poll.remote(after, acknowledged, wait_s)
        return answer

    async def snapshot_parts(self, index: int) -> tuple[SnapshotPart, ...]:
        answer: tuple[SnapshotPart, ...] = await self._handles[index].snapshot_parts.remote()
        return answer

    async def interrupt(self, index: int, generation: int) -> None:
        await self._handles[index].interrupt.remote(generation)

    async def request_yield(self, index: int, generation: int, durable: bool) -> None:
        await self._handles[index].request_yield.remote(generation, durable)

    async def forget_memory(self, index: int) -> None:
        await self._handles[index].forget_memory.remote()

    def knows(self, index: int) -> bool:
        """It was started or found, and not lost since."""
        return index in self._handles

    def actor_id(self, index: int) -> str | None:
        """Ray's, while the worker is known."""
        handle = self._handles.get(index)
        return None if handle is None else handle._actor_id.hex()

    def by_node(self) -> dict[str, list[int]]:
        """By node id, the workers that live there, as far as is known."""
        found: dict[str, list[int]] = {}
        for index, info in self._infos.items():
            if index in self._handles:
                found.setdefault(info.node_id, []).append(index)
        return found

    async def kill(self, index: int) -> None:
        """End the worker, whatever state it is in; returns when that was done, or somebody else has to do it."""
        info = self._infos.pop(index, None)
        creating = self._creating.pop(index, None)
        if creating is not None:
            self._killers.submit(creating.add_done_callback, _kill_created)  # may wait for the head at once
            await asyncio.wait({asyncio.wrap_future(creating)}, timeout=_KILL_S)
        handle = self._handles.pop(index, None)
        if handle is None:
            return
        if info is not None:
            handle.retire.remote(_RETIRE_S)
        loop = asyncio.get_running_loop()
        killing = loop.run_in_executor(self._killers, partial(ray.kill, handle, no_restart=True))
        await asyncio.wait({killing}, timeout=_KILL_S)
        if info is not None:
            await asyncio.sleep(_KILL_S)
            await self._terminate(info)

    def forget(self, index: int) -> None:
        """The worker is known to be gone."""
        self._handles.pop(index, None)
        self._infos.pop(index, None)

    async def _terminate(self, info: WorkerInfo) -> None:
        """SIGKILL for a worker that Ray's kill did not end: Ray itself would wait five seconds, holding its resources,
        and for the head, if that is away. Only a worker of the same node can do it; without one, Ray does."""
        if info.node_id == self._node_id:
            if is_worker_process(info.pid):
                os.kill(info.pid, signal.SIGKILL)
            return
        for helper in self.by_node().get(info.node_id, ()):
            try:
                call = self._handles[helper].terminate.remote(info.pid, info.worker_id)
                await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout=_TERMINATE_S)
                return
            except (RayError, TimeoutError, KeyError):
                continue  # the helper is gone or stopped, too

    def _create(self, worker_id: str, avoid_nodes: tuple[str, ...], only_on: str) -> ActorHandle:
        config = self._config
        options = dict(self._options)
        if only_on:
            options["label_selector"] = {"ray.io/node-id": only_on}
        elif avoid_nodes:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoid_nodes)})"}
        return self._actor_class.options(name=worker_id, **options).remote(
            config.spec,
            WorkerConfig(
                job_id=config.job_id,
                attempt=config.attempt,
                worker_id=worker_id,
                checkpoint_root=config.checkpoint_root,
                snapshot_key=config.snapshot_key,
                expected_bytes=self._rank_bytes,
            ),
        )


def _rank_bytes(config: SupervisorConfig) -> int:
    """Of the largest group, which needs least of each: what a worker can take beforehand."""
    return plan(config.spec, config.spec.elasticity.max_workers, config.profile).rank_bytes


def cause_of(error: RayActorError) -> IncidentCause:
    """What Ray says took the worker: its node, or only itself. Ray tells the two apart in words only."""
    words = str(error).lower()
    by_node = any(phrase in words for phrase in ("its node has died", "node was terminated", "node died"))
    return IncidentCause.NODE_DIED if by_node else IncidentCause.WORKER_DIED


def _kill_created(creating: Future[ActorHandle]) -> None:
    """It was given up before Ray had taken note of it. Never on the loop, which may be gone by then."""
    if not creating.cancelled() and creating.exception() is None:
        ray.kill(creating.result(), no_restart=True)
