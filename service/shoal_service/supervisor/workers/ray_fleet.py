"""RayFleet: the workers of one attempt as Ray actors. Starts, finds, calls and kills them; decides nothing.

Made by `supervisor/actor.py`, called by the executor and its worker clients. Creating an actor waits for the Ray head,
and killing one may; both run on threads of their own, since the executor must go on while the head is away. Hidden
here: options of actors and on which node Ray should start each (NodePreference), what Ray's errors mean, and whose
stack is read from where:

    worker answers within ANSWER_S (*)       its own frames, with the module of the model that it is in
    it does not (stopped, GIL held)          py-spy, run by the supervisor if that is on the same node,
    native frames are wanted                 else by another worker of the node

    (*) and longer in a large group, all of whose workers are asked at once
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from shoal_service.supervisor.protocols import WORKER_CALLS, WorkerCallError, WorkerDied, WorkerUnavailable
from shoal_service.supervisor.workers.processes import worker_environment
from shoal_workers import exit_status, ray_internals, stacks
from shoal_workers.actor import CONCURRENCY_GROUPS, WorkerActor
from shoal_workers.contract import (
    NAMESPACE,
    ErrorReport,
    IncidentCause,
    JobSpec,
    Placement,
    Refused,
    StackSource,
    WorkerConfig,
    WorkerInfo,
    WorkerStack,
    label_selector,
)
from shoal_workers.contract.messages import Frame
from shoal_workers.stacks import is_worker_process
from shoal_workers.version import VERSION

_GIB = 1 << 30
_NODE_ID = "ray.io/node-id"
_NUM_THREADS = 8
_KILL_S = 0.3
"""Ray's own kill takes some tens of milliseconds; it has no effect on a stopped process (SIGSTOP)."""
_TERMINATE_S = 2.0
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
        self._require_current = require_current
        self._on_replaced = on_replaced
        self._handles: dict[int, ActorHandle] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._creating: dict[int, Future[ActorHandle]] = {}
        self._creators = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="create")
        self._killers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kill")
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
        index = order.index
        creating = self._creating[index] = self._creators.submit(self._create, order)
        try:
            with worker_errors():
                handle = await asyncio.shield(asyncio.wrap_future(creating))
        except WorkerCallError:
            self._creating.pop(index, None)
            raise
        self._creating.pop(index, None)  # not when this is cancelled: Ray may still create the actor; `kill` follows
        self._handles[index] = handle

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        try:
            self._handles[index] = ray.get_actor(worker_id, namespace=NAMESPACE)
        except ValueError:
            return False
        if info is not None:
            self._know(index, info)
        return True

    async def adopt(self, index: int, generation: int) -> None:
        await self._answer(self._handles[index].adopt.remote(self._life, generation))

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport:
        answer: WorkerInfo | ErrorReport = await self._answer(self._handles[index].prepare.remote(self._life))
        if isinstance(answer, WorkerInfo):
            self._know(index, answer)
        return answer

    def __getattr__(self, name: str) -> Any:
        """Return any method of `protocols.WorkerCalls`."""
        if name not in WORKER_CALLS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(self._ask, name)

    async def _ask(self, name: str, index: int, *arguments: Any) -> Any:
        return await self._answer(getattr(self._handles[index], name).remote(*arguments, self._life))

    async def stack(self, index: int, *, native: bool = False) -> WorkerStack:
        return await take_stack(index, self._handles, self._infos, self._node_id, life=self._life, native=native)

    async def _answer(self, call: Awaitable[Any]) -> Any:
        with worker_errors():
            answer = await call
        if isinstance(answer, Refused):
            self._on_replaced()
        return answer

    def _know(self, index: int, info: WorkerInfo) -> None:
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
        for helper in self.by_node().get(info.node_id, ()):
            try:
                call = self._handles[helper].exit_words.remote(info.pid)
                return str(await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout=_TERMINATE_S)) or None
            except (RayError, TimeoutError, KeyError):
                continue  # the helper has ended, or is stopped
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
        creating = self._creating.pop(index, None)
        if creating is not None:
            self._killers.submit(
                creating.add_done_callback, self._kill_created
            )  # may run immediately and wait for the head
            await asyncio.wait({asyncio.wrap_future(creating)}, timeout=_KILL_S)
        handle = self._handles.pop(index, None)
        if handle is None:
            return
        if info is not None:
            handle.retire.remote(_RETIRE_S, self._life)
        loop = asyncio.get_running_loop()
        killing = loop.run_in_executor(self._killers, partial(self._kill_actor, handle))
        await asyncio.wait({killing}, timeout=_KILL_S)
        if info is not None:
            await asyncio.sleep(_KILL_S)
            await self._terminate(info)

    def forget(self, index: int) -> None:
        self._preference.forget(index)
        self._handles.pop(index, None)
        self._infos.pop(index, None)

    def _kill_actor(self, handle: ActorHandle) -> None:
        """Kills an actor. Runs on a thread, because it waits for the head if that is away."""
        self._require_current()
        ray.kill(handle, no_restart=True)

    def _kill_created(self, creating: Future[ActorHandle]) -> None:
        """Kills a worker whose end was ordered before Ray had created it."""
        # called by a future's thread, not on the loop, which may be closed by then
        if not creating.cancelled() and creating.exception() is None:
            self._kill_actor(creating.result())

    async def _terminate(self, info: WorkerInfo) -> None:
        """Sends SIGKILL to a worker that Ray's kill did not end."""
        # Ray itself would hold its resources for five seconds more, and would wait for the head if it is away. The
        # signal must be sent by a process of the same node; if there is none, Ray ends the worker.
        if info.node_id == self._node_id:
            if is_worker_process(info.pid):
                os.kill(info.pid, signal.SIGKILL)
            return
        for helper in self.by_node().get(info.node_id, ()):
            try:
                call = self._handles[helper].terminate.remote(info.pid, self._life)
                await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout=_TERMINATE_S)
                return
            except (RayError, TimeoutError, KeyError):
                continue  # the helper has ended, or is stopped

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
        self._read = read or _live_nodes
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
            nodes = self._rooms(order, labels)
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

    def _rooms(self, order: StartWorker, labels: Mapping[str, str]) -> list[NodeRoom]:
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
            if (room := self._room(node)) > 0 and node.node_id not in order.avoid_nodes and _has(node.labels, labels)
        ]

    def _room(self, node: FreeNode) -> int:
        fits = min(int(node.free.get(name, 0.0) / amount + _EPSILON) for name, amount in self._needs.items())
        return fits - self._taken[node.node_id]


def _live_nodes() -> list[FreeNode]:
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


ANSWER_S = 1.0
_OUTSIDE_S = 8.0


async def take_stack(
    index: int,
    handles: Mapping[int, ActorHandle],
    infos: Mapping[int, WorkerInfo],
    node_id: str,
    *,
    life: int,
    native: bool = False,
) -> WorkerStack:
    """Takes the stack of a worker. Raises nothing: a worker without a stack has an `error`. `node_id`: of the
    supervisor."""
    handle, info = handles.get(index), infos.get(index)
    name = info.worker_id if info is not None else str(index)
    answer_s = ANSWER_S + later_s(len(handles))
    if handle is None:
        return WorkerStack(worker_id=name, source=StackSource.NONE, error="the worker has ended")
    if not native or info is None:
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(handle.stack.remote(life).future()), answer_s)
            if isinstance(answer, WorkerStack):
                return answer
        except (RayError, TimeoutError):
            pass  # it is stopped, hangs with the GIL held, or has ended
    if info is None:
        message = f"the worker starts, and did not answer within {answer_s:.3g} s"
        return WorkerStack(worker_id=name, source=StackSource.NONE, error=message)
    stack = await _from_outside(info, handles, infos, node_id, native=native)
    if stack is None:
        stack = f"it did not answer within {answer_s:.3g} s, and no other worker of its node can look at it"
    if isinstance(stack, str):
        return WorkerStack(worker_id=name, pid=info.pid, source=StackSource.NONE, error=stack)
    return WorkerStack(worker_id=name, pid=info.pid, frames=stack, source=StackSource.PY_SPY)


async def _from_outside(
    info: WorkerInfo, handles: Mapping[int, ActorHandle], infos: Mapping[int, WorkerInfo], node_id: str, *, native: bool
) -> tuple[Frame, ...] | str | None:
    """The frames as another process sees them, or why there are none; None if no process of the node can look at the
    worker."""
    if info.node_id == node_id:
        return await asyncio.to_thread(stacks.of_worker, info.pid, native=native)
    for helper, other in list(infos.items()):
        if other.node_id == info.node_id and other.pid != info.pid and helper in handles:
            try:
                call = handles[helper].stack_of.remote(info.pid, native)
                answer: tuple[Frame, ...] | str = await asyncio.wait_for(asyncio.wrap_future(call.future()), _OUTSIDE_S)
                return answer
            except (RayError, TimeoutError):
                continue  # the helper has ended, or is stopped
    return None


_IP = re.compile(r"\bip=([\w.:]+)")


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns Ray's errors into those of `protocols`."""
    try:
        yield
    except ActorUnavailableError as error:
        raise WorkerUnavailable(first_line(error)) from error
    except RayActorError as error:
        raise WorkerDied(_death_words(error), _cause_of(error)) from error
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
    if _cause_of(error) is IncidentCause.NODE_DIED:
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


def _cause_of(error: RayActorError) -> IncidentCause:
    """Tell whether the worker died alone or with its node. Ray distinguishes the two in its message only."""
    message = str(error).lower()
    by_node = any(phrase in message for phrase in ("its node has died", "node was terminated", "node died"))
    return IncidentCause.NODE_DIED if by_node else IncidentCause.WORKER_DIED
