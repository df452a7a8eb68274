"""RayFleet: the workers of one attempt as Ray actors. Starts, finds, calls and kills them; decides nothing.

Made by `supervisor/actor.py`, called by the executor and its worker clients. Creating an actor waits for the Ray head,
and killing one may; both run on threads of their own, since the executor must go on while the head is away. Hidden
here: options of actors and on which node Ray should start each (NodePreference), what Ray's errors mean, and whose
stack is read from where:

    worker answers within ANSWER_S (*)       its own frames, with the module of the model that it is in
    it does not (stopped, GIL held)          py-spy, run by the supervisor if that is on the same node,
    native frames are wanted                 else by another worker of the node

    (*) and longer in a large group, all of whose workers are asked at once

RayAgents does the same for the agents of the attempt, for the AgentPool.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
)

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.core.attempt.placement import NodeRoom, choose_node
from shoal_service.core.attempt.state import later_s
from shoal_service.planner import plan
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.copies import CodePackage
from shoal_service.supervisor.journal import JOURNAL_NAMESPACE, end_replaced_process
from shoal_service.supervisor.protocols import WORKER_CALLS, AgentFailed, WorkerCallError, WorkerDied, WorkerUnavailable
from shoal_service.supervisor.workers.processes import agent_environment, worker_environment
from shoal_workers import exit_status, ray_internals, stacks
from shoal_workers.actor import CONCURRENCY_GROUPS, WorkerActor
from shoal_workers.contract import (
    NAMESPACE,
    Assignment,
    ErrorReport,
    IncidentCause,
    JobSpec,
    NodePoll,
    Placement,
    PollRequest,
    Refused,
    SnapshotSource,
    StackSource,
    WorkerConfig,
    WorkerExit,
    WorkerInfo,
    WorkerStack,
    agent_name,
    label_selector,
)
from shoal_workers.contract.messages import Frame
from shoal_workers.poll_agent.agent import PollAgent
from shoal_workers.stacks import is_worker_process
from shoal_workers.version import VERSION

K = TypeVar("K", int, str)
_GIB = 1 << 30
_NODE_ID = "ray.io/node-id"
_NUM_THREADS = 8
_FEW_PARTS = 64
"""Up to this many parts of a snapshot are sent with each order: 8 kB."""
_KILL_S = 0.3
"""Ray's own kill takes some tens of milliseconds; it has no effect on a stopped process (SIGSTOP)."""
_TERMINATE_S = 2.0
ANSWER_S = 1.0
_OUTSIDE_S = 8.0
_RETIRE_S = 2.0
"""`ray.kill` can be lost with the head, so the worker is also asked to exit after this many seconds."""


class RayFleet:
    """Holds actor handles by worker index. The real `protocols.Fleet`."""

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        life: int = 1,
        require_current: Callable[[], None] = lambda: None,
        on_replaced: Callable[[], None] = end_replaced_process,
        worker_class: type[WorkerActor] = WorkerActor,
    ) -> None:
        """
        Args:
            require_current: the journal's. Ray does not fence kills, so this is asked before each one.
            on_replaced: called when a worker refuses a call, since it obeys a later supervisor; must not return.
        """
        self._config = config
        self._life = life
        self._actors = ActorTable[int](on_replaced, require_current)
        self._handles = self._actors.handles
        self._infos: dict[int, WorkerInfo] = {}
        self._shared: tuple[SnapshotSource, ray.ObjectRef[SnapshotSource]] | None = None
        """What the newest large group restores from, and where each worker reads it."""
        self._node_id: str = ray.get_runtime_context().get_node_id()
        worker = config.spec.worker
        self._options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": worker.cpus,
            "num_gpus": worker.gpus,
            "runtime_env": worker_environment(config),
        }
        if config.spec.placement is Placement.SPREAD:
            self._options["scheduling_strategy"] = "SPREAD"
        if worker.memory_gib:
            self._options["memory"] = int(worker.memory_gib * _GIB)
        needs = {"CPU": worker.cpus, "GPU": worker.gpus, "memory": self._options.get("memory", 0)}
        self._preference = NodePreference(needs, config.spec.placement)
        self._rank_bytes = 0 if worker.gpus else _rank_bytes(config)
        self._actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(worker_class)

    async def start(self, order: StartWorker) -> None:
        with worker_errors():
            await self._actors.create(order.index, partial(self._create, order))

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        try:
            self._handles[index] = ray.get_actor(worker_id, namespace=NAMESPACE)
        except ValueError:
            return False
        if info is not None:
            self._add_known(index, info)
        return True

    async def adopt(self, index: int, generation: int) -> None:
        await self._answer(self._handles[index].adopt.remote(self._life, generation))

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport:
        answer: WorkerInfo | ErrorReport = await self._answer(self._handles[index].prepare.remote(self._life))
        if isinstance(answer, WorkerInfo):
            self._add_known(index, answer)
        return answer

    async def run(self, index: int, assignment: Assignment) -> WorkerExit:
        """Send the order. What a large group restores from names a server for each rank, and is the same for all: it is
        put into Ray's object store once, and each node fetches it from there. If Ray cannot store it, the order has it.
        """
        source = assignment.restore_snapshot
        if source is None or len(source.parts) <= _FEW_PARTS:
            return cast(WorkerExit, await self._ask("run", index, assignment))
        if self._shared is None or self._shared[0] is not source:
            try:
                self._shared = source, ray.put(source)
            except RayError:  # the store is full, or the head is away
                return cast(WorkerExit, await self._ask("run", index, assignment))
        small = assignment.model_copy(update={"restore_snapshot": None})
        run = self._handles[index].run.remote(small, self._life, self._shared[1])
        return cast(WorkerExit, await self._answer(run))

    def __getattr__(self, name: str) -> Any:
        """Return any method of `protocols.WorkerCalls`."""
        if name not in WORKER_CALLS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(self._ask, name)

    async def _ask(self, name: str, index: int, *arguments: Any) -> Any:
        return await self._answer(getattr(self._handles[index], name).remote(*arguments, self._life))

    async def stack(self, index: int, *, native: bool = False) -> WorkerStack:
        handle, info = self._handles.get(index), self._infos.get(index)
        name = info.worker_id if info is not None else str(index)
        answer_s = ANSWER_S + later_s(len(self._handles))
        if handle is None:
            return WorkerStack(worker_id=name, source=StackSource.NONE, error="the worker has ended")
        if not native or info is None:
            with suppress(RayError, TimeoutError):  # it is stopped, hangs with the GIL held, or has ended
                call = handle.stack.remote(self._life)
                answer = await asyncio.wait_for(asyncio.wrap_future(call.future()), answer_s)
                if isinstance(answer, WorkerStack):
                    return answer
        if info is None:
            message = f"the worker starts, and did not answer within {answer_s:.3g} s"
            return WorkerStack(worker_id=name, source=StackSource.NONE, error=message)
        frames = await self._read_frames_from_outside(info, native=native)
        if frames is None:
            frames = f"it did not answer within {answer_s:.3g} s, and no other worker of its node can look at it"
        if isinstance(frames, str):
            return WorkerStack(worker_id=name, pid=info.pid, source=StackSource.NONE, error=frames)
        return WorkerStack(worker_id=name, pid=info.pid, frames=frames, source=StackSource.PY_SPY)

    async def _read_frames_from_outside(self, info: WorkerInfo, *, native: bool) -> tuple[Frame, ...] | str | None:
        """Return the frames as another process sees them, or why there are none; None if no process of the node can
        look at the worker."""
        if info.node_id == self._node_id:
            return await asyncio.to_thread(stacks.of_worker, info.pid, native=native)
        answer: tuple[Frame, ...] | str | None = await self._ask_neighbours(
            info, lambda handle: handle.stack_of.remote(info.pid, native), _OUTSIDE_S
        )
        return answer

    async def _answer(self, call: Awaitable[Any]) -> Any:
        with worker_errors():
            return await self._actors.answer(call)

    def _add_known(self, index: int, info: WorkerInfo) -> None:
        self._infos[index] = info
        self._preference.is_on(index, info.node_id)

    def knows(self, index: int) -> bool:
        return index in self._handles

    def actor_id(self, index: int) -> str | None:
        handle = self._handles.get(index)
        return None if handle is None else ray_internals.actor_id(handle)

    async def exit_words(self, info: WorkerInfo) -> str | None:
        """The exit status of a worker in words, read on the worker's node: here, or by another worker there. A driver
        does not know its raylet's socket."""
        if info.node_id == self._node_id and (socket := ray_internals.raylet_socket()):
            exit_state = exit_status.read(socket, info.pid)
            return exit_state.words() if exit_state is not None else None
        words = await self._ask_neighbours(info, lambda handle: handle.exit_words.remote(info.pid), _TERMINATE_S)
        return str(words) if words else None

    async def _ask_neighbours(
        self, info: WorkerInfo, ask: Callable[[ActorHandle], ray.ObjectRef[Any]], within_s: float
    ) -> Any:
        """Ask the other workers of this worker's node, one after the other. Return the first answer; None if there is
        none. `within_s`: for each answer."""
        others = [i for i, other in self._infos.items() if other.node_id == info.node_id and other.pid != info.pid]
        for index in others:
            with suppress(RayError, TimeoutError, KeyError):  # the neighbour has ended, or is stopped
                return await asyncio.wait_for(asyncio.wrap_future(ask(self._handles[index]).future()), within_s)
        return None

    async def died_at(self, actor_id: str) -> float | None:
        return await gcs.died_at(actor_id)

    def by_node(self) -> dict[str, list[int]]:
        workers_by_node: dict[str, list[int]] = {}
        for index, info in self._infos.items():
            if index in self._handles:
                workers_by_node.setdefault(info.node_id, []).append(index)
        return workers_by_node

    async def kill(self, index: int) -> None:
        self._preference.forget(index)
        info = self._infos.pop(index, None)
        was_there = await self._actors.kill(
            index, lambda handle: info is not None and handle.retire.remote(_RETIRE_S, self._life)
        )
        if was_there and info is not None:
            await asyncio.sleep(_KILL_S)
            await self._terminate(info)

    def forget(self, index: int) -> None:
        self._preference.forget(index)
        self._handles.pop(index, None)
        self._infos.pop(index, None)

    async def _terminate(self, info: WorkerInfo) -> None:
        """Sends SIGKILL to a worker that Ray's kill did not end."""
        # Ray itself would hold its resources for five seconds more, and would wait for the head if it is away. The
        # signal must be sent by a process of the same node; if there is none, Ray ends the worker.
        if info.node_id != self._node_id:
            await self._ask_neighbours(info, lambda handle: handle.terminate.remote(info.pid, self._life), _TERMINATE_S)
        elif is_worker_process(info.pid):
            os.kill(info.pid, signal.SIGKILL)

    def _create(self, order: StartWorker) -> ActorHandle:
        """Creates the worker of this name, or finds the one that a predecessor has started just before its death."""
        config = self._config
        options = dict(self._options)
        labels = node_labels(config.spec)
        if order.only_on:
            labels[_NODE_ID] = order.only_on
        else:
            preferred = self._preference.choose(order, labels)
            if order.avoid_nodes or preferred:
                labels[_NODE_ID] = f"!in({','.join(order.avoid_nodes) or 'none'})"
            if preferred:  # and if it has no room by then, any other
                options["fallback_strategy"] = [{"label_selector": dict(labels)}]
                labels[_NODE_ID] = preferred
        if order.is_beside:
            options |= {"num_cpus": 0, "memory": None}
        if order.code:
            config = with_code(config, order.code)
            options["runtime_env"] = worker_environment(config)
        if labels:
            options["label_selector"] = labels
        if config.code_uri is not None:
            packages, copies = gcs.GcsKeyValueStore(None), gcs.GcsKeyValueStore(JOURNAL_NAMESPACE)
            CodePackage(packages, copies, config.job_id, config.attempt, config.code_uri).restore()
        return self._actor_class.options(name=order.worker_id, get_if_exists=True, **options).remote(
            config.spec,
            WorkerConfig(
                job_id=config.job_id,
                attempt=config.attempt,
                worker_id=order.worker_id,
                checkpoint_root=config.checkpoint_root,
                snapshot_key=config.snapshot_key,
                snapshot_scope=config.snapshot_scope,
                expected_bytes=self._rank_bytes if order.touches_memory else 0,
                logs=config.logs,
                rack_label=config.rack_label,
            ),
        )


def with_code(config: SupervisorConfig, version: str) -> SupervisorConfig:
    code = config.spec.code.model_copy(update={"archive": version})
    spec = config.spec.model_copy(update={"code": code})
    return config.model_copy(update={"spec": spec, "code_uri": ray_internals.package_uri(version)})


def node_labels(spec: JobSpec) -> dict[str, str]:
    """The labels that a worker's node must have, as Ray's `label_selector`."""
    return label_selector(spec.worker.node_labels, spec.capacity)


def _rank_bytes(config: SupervisorConfig) -> int:
    """Memory of one rank in the largest group, in which each rank needs least. A worker can reserve it in advance."""
    return plan(config.spec, config.spec.elasticity.max_workers, config.profile).rank_bytes


_READ_S = 1.0
"""How long a table is used; nodes report a change after about 0.1 s."""
_NOT_IN = "!in("
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class FreeNode:
    node_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    """Resources that nothing reserves, by Ray's names."""


class NodePreference:
    """Chooses the node on which Ray should start each new worker, from what is free in the cluster now.

    It reads the head's tables and remembers what it has chosen since; `core/attempt/placement.py` decides.
    Thread-safe: called on the threads that create actors.
    """

    def __init__(
        self,
        needs: Mapping[str, float],
        placement: Placement,
        *,
        read: Callable[[], Sequence[FreeNode]] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            needs: what one worker reserves, by Ray's names of resources. Without any, all nodes have room for all
                workers, and Ray chooses.
            read: the live nodes; raises GcsUnavailable. Default: from the head of the cluster.
        """
        self._needs = {name: amount for name, amount in needs.items() if amount}
        self._placement = placement
        self._read = read or _list_live_nodes
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._node_of: dict[int, str] = {}
        """Id of the node on which each worker is, or ought to be, by worker index."""
        self._held: Counter[str] = Counter()
        self._nodes: Sequence[FreeNode] = ()
        self._read_mono = float("-inf")
        self._taken: Counter[str] = Counter()
        """Number of workers for which each node was chosen since the table was read, by node id."""

    def choose(self, order: StartWorker, labels: Mapping[str, str]) -> str:
        """The id of the node; empty if Ray chooses, also because the head does not answer within some seconds.

        Args:
            labels: of the nodes on which the worker may be, as Ray's `label_selector`.
        """
        if not self._needs:
            return ""
        with self._lock:
            nodes = self._list_rooms(order, labels)
            chosen = choose_node(nodes, num_missing=order.num_missing, tp=order.tp, placement=self._placement)
            if chosen:
                self._taken[chosen] += 1
                self._move(order.index, chosen)
            return chosen

    def is_on(self, index: int, node_id: str) -> None:
        """Notes that the worker runs there, wherever it ought to be."""
        with self._lock:
            self._move(index, node_id)

    def forget(self, index: int) -> None:
        """Notes that the worker has ended."""
        with self._lock:
            self._move(index, "")

    def _move(self, index: int, node_id: str) -> None:
        before = self._node_of.pop(index, "")
        if before:
            self._held[before] -= 1
        if node_id:
            self._node_of[index] = node_id
            self._held[node_id] += 1

    def _list_rooms(self, order: StartWorker, labels: Mapping[str, str]) -> list[NodeRoom]:
        if self._monotonic() - self._read_mono > _READ_S:
            try:
                self._nodes = self._read()
            except GcsUnavailable:
                self._nodes = ()
            self._read_mono = self._monotonic()
            self._taken.clear()
        return [
            NodeRoom(node.node_id, room, self._held[node.node_id])
            for node in self._nodes
            if (room := self._count_room(node)) > 0
            and node.node_id not in order.avoid_nodes
            and _has(node.labels, labels)
        ]

    def _count_room(self, node: FreeNode) -> int:
        fits = min(int(node.free.get(name, 0.0) / amount + _EPSILON) for name, amount in self._needs.items())
        return fits - self._taken[node.node_id]


def _list_live_nodes() -> list[FreeNode]:
    free = gcs.available()
    return [FreeNode(node.node_id, node.labels, free.get(node.node_id, {})) for node in gcs.nodes() if node.is_alive]


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether the labels match. Understands the expressions of Ray that Shoal uses: a value, and `!in(a,b)`."""
    for name, value in wanted.items():
        if value.startswith(_NOT_IN):
            if labels.get(name) in value.removeprefix(_NOT_IN).removesuffix(")").split(","):
                return False
        elif labels.get(name) != value:
            return False
    return True


_IP = re.compile(r"\bip=([\w.:]+)")


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns Ray's errors into those of `protocols`."""
    try:
        yield
    except ActorUnavailableError as error:
        raise WorkerUnavailable(first_line(error)) from error
    except RayActorError as error:
        raise WorkerDied(_death_words(error), _find_cause(error)) from error
    except ActorUnschedulableError as error:  # `only_on` names a node that Ray no longer has
        raise WorkerDied("the node on which the worker was to start is gone", IncidentCause.NODE_DIED) from error
    except RuntimeEnvSetupError as error:
        raise WorkerCallError(_setup_words(error)) from error
    except RayError as error:
        raise WorkerCallError(first_line(error)) from error


def first_line(error: RayError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _setup_words(error: RuntimeEnvSetupError) -> str:
    """Why the runtime environment could not be set up. Ray's first line names no reason; the last one is the error
    itself, below its traceback."""
    lines = (error.error_message or "").strip().splitlines()
    return f"Ray could not set up the runtime environment: {lines[-1].strip() if lines else 'it names no reason'}"


def _death_words(error: RayActorError) -> str:
    """Why the worker died. Ray's first line names no reason ("The actor died unexpectedly before finishing this task").
    What Ray does know is in the lines below; the exit status is asked for afterwards, see `exit_words`."""
    message = str(error).lower()
    if _find_cause(error) is IncidentCause.NODE_DIED:
        return "Ray reports that the worker's node died"
    if "running low on memory" in message or "memory usage threshold" in message:
        return "the worker was killed by Ray: its node was running low on memory"
    if "creation task" in message:
        return _creation_words(str(error))
    if "intended" in message and "ray.kill" in message:
        return "the worker was killed through Ray (ray.kill)"
    return "the worker's process ended"


def _creation_words(text: str) -> str:
    # its constructor raised, or its class could not be imported: Shoal's own code, in the release of that node
    node, lines = _IP.search(text), text.strip().splitlines()
    return (
        f"the worker could not be created{f' on {node[1]}' if node else ''}: {lines[-1].strip()} (its supervisor is "
        f"Shoal {VERSION}; install the same release on every node)"
    )


def _find_cause(error: RayActorError) -> IncidentCause:
    """Tell whether the worker died alone or with its node. Ray distinguishes the two in its message only."""
    message = str(error).lower()
    by_node = any(phrase in message for phrase in ("its node has died", "node was terminated", "node died"))
    return IncidentCause.NODE_DIED if by_node else IncidentCause.WORKER_DIED


_IDLE_S = 30.0
"""An agent that gets no call for this long ends by itself: the supervisor is gone, or does not need it any more."""


class RayAgents:
    """Holds actor handles by node id. The real `protocols.PollAgents`."""

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        life: int = 1,
        on_replaced: Callable[[], None] = end_replaced_process,
        idle_s: float = _IDLE_S,
    ) -> None:
        """`on_replaced`: called when an agent refuses a call, since it obeys a later supervisor; must not return."""
        self._config = config
        self._life = life
        self._actors = ActorTable[str](on_replaced)
        self._idle_s = idle_s
        self._actor_class = ray.remote(PollAgent)

    async def start(self, node_id: str) -> None:
        with _agent_errors():
            handle = await self._actors.create(node_id, partial(self._create, node_id))
            await self._actors.answer(handle.ping.remote(self._life))

    async def poll(self, node_id: str, requests: Sequence[PollRequest]) -> NodePoll:
        handle = self._actors.handles.get(node_id)
        if handle is None:
            raise AgentFailed("the agent was not started")
        with _agent_errors():
            answer: NodePoll = await self._actors.answer(handle.poll.remote(tuple(requests), self._life))
        return answer

    async def end(self, node_id: str) -> None:
        await self._actors.kill(node_id, lambda handle: handle.end.remote(self._life))

    def _create(self, node_id: str) -> ActorHandle:
        """Creates the agent of this name, or finds the one that a predecessor has started."""
        return self._actor_class.options(
            name=agent_name(self._config.job_id, self._config.attempt, node_id),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            label_selector={_NODE_ID: node_id},
            runtime_env=agent_environment(self._config),
        ).remote(self._idle_s)


@contextmanager
def _agent_errors() -> Iterator[None]:
    """Turns Ray's errors into that of `protocols`."""
    try:
        yield
    except RayError as error:
        raise AgentFailed(first_line(error)) from error


class ActorTable(Generic[K]):
    """Creates, calls and kills the actors of an attempt. Creating and killing wait for the head, so both run on
    threads."""

    def __init__(self, on_replaced: Callable[[], None], require_current: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            on_replaced: called when an actor refuses a call, since it obeys a later supervisor; must not return.
            require_current: called before each kill.
        """
        self.handles: dict[K, ActorHandle] = {}
        self._on_replaced = on_replaced
        self._require_current = require_current
        self._creating: dict[K, Future[ActorHandle]] = {}
        self._creators = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="create")
        self._killers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kill")

    async def create(self, key: K, make: Callable[[], ActorHandle]) -> ActorHandle:
        """Raises RayError."""
        creating = self._creating[key] = self._creators.submit(make)
        try:
            handle = await asyncio.shield(asyncio.wrap_future(creating))
        except RayError:
            self._creating.pop(key, None)
            raise
        self._creating.pop(key, None)  # not when this is cancelled: Ray may still create the actor; `kill` follows
        self.handles[key] = handle
        return handle

    async def answer(self, call: Awaitable[Any]) -> Any:
        """Wait for the answer to a call. Raises RayError."""
        answer = await call
        if isinstance(answer, Refused):
            self._on_replaced()
        return answer

    async def kill(self, key: K, ask_to_end: Callable[[ActorHandle], object]) -> bool:
        """Ask an actor to end, and kill it. False if there is none; one that is being created is killed afterwards."""
        creating = self._creating.pop(key, None)
        if creating is not None:
            # on a thread: the callback may run at once, and wait for the head
            self._killers.submit(creating.add_done_callback, self._kill_created)
            await asyncio.wait({asyncio.wrap_future(creating)}, timeout=_KILL_S)
        handle = self.handles.pop(key, None)
        if handle is None:
            return False
        ask_to_end(handle)
        killing = asyncio.get_running_loop().run_in_executor(self._killers, self._kill_now, handle)
        await asyncio.wait({killing}, timeout=_KILL_S)
        return True

    def _kill_now(self, handle: ActorHandle) -> None:
        self._require_current()
        ray.kill(handle, no_restart=True)

    def _kill_created(self, creating: Future[ActorHandle]) -> None:
        # called by a future's thread, not on the loop, which may be closed by then
        if not creating.cancelled() and creating.exception() is None:
            self._kill_now(creating.result())
