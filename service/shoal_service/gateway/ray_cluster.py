"""RayCluster: the connection to Ray. Reads nodes, starts and finds supervisors; decides nothing.

Made by `process.py`, called by the gateway on its threads: for the orders of control planes, and for its reports.

What only the node itself can answer runs there, as Ray tasks and actors that reserve no CPU:

    packages of `code.pip`   listed and removed: they are local files of the workers, with whose account the tasks run
    storage of checkpoints   seen from where the workers are: the gateway's machine may have other mounts
    releases of Shoal        asked for when a supervisor could not be created: a node with another release is the most
                             probable reason, and no error of Ray names it
    a suspected node         tested: an actor on it, and one on a partner node, compute and communicate

A node that does not answer in time is left out.

Ray also starts processes before there is an actor for them. A raylet keeps such a process idle until an actor with the
same runtime environment comes, which then need not wait for a process. Each of them becomes the process of one actor.
If no actor comes, the process ends itself (`shoal_workers/forkserver/idle.py`). Nothing depends on it: if a request is
lost, Ray starts the process with the actor.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ray.actor import ActorHandle
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RaySystemError, RpcError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.connects import answers, listens
from shoal_service.cluster.errors import (
    ClusterUnreachable,
    ConnectionStale,
    GcsUnavailable,
)
from shoal_service.cluster.gcs import RayNode
from shoal_service.clusters.wire import ClusterSnapshot, FoundSupervisor, Reservation, RoomKind, UnusedPackages
from shoal_service.core import reachability
from shoal_service.core.nodes import Drain, DrainSource, Node
from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.core.supervisor_starts import MAX_UNRECORDED_STARTS, ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.actor import SupervisorActor
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.copies import CodePackage, StoredConfig, drop_unheld, hash_archive
from shoal_service.supervisor.journal import JOURNAL_NAMESPACE, GcsJournal, num_lives
from shoal_service.supervisor.workers.processes import (
    RESERVED_S,
    serialized_supervisor_environment,
    serialized_worker_environment,
    supervisor_environment,
)
from shoal_workers.contract.ids import NAMESPACE, attempt_of, job_of_worker, supervisor_name
from shoal_workers.forkserver import PATIENCE_S
from shoal_workers.ray_internals import actor_id, package_uri, request_idle_processes
from shoal_workers.version import VERSION

_GIB = 1 << 30
_NODE_LABEL = "ray.io/node-id"
_FORGET_S = 2.0
_FREE_S = 5.0
_NOT_CREATED = "creation task"
"""Part of Ray's words for an actor whose constructor raised, or whose class could not be imported."""
_UNANSWERED_S = 5.0
"""How long the head may accept connections without answering. A restarted head accepts its old clients within a second
or two."""


class RayCluster:
    """Connects to Ray for the gateway. The real `answering.RayAccess`; call `connect` first."""

    def __init__(
        self, supervisor_class: type[SupervisorActor] = SupervisorActor, *, address: Home | None = None
    ) -> None:
        """
        Args:
            supervisor_class: the actors that it starts.
            address: where they report; None if the home that they are given has its address already, if there is one.
        """
        self._supervisor_class = supervisor_class
        self._home_address = address
        self._started: dict[tuple[str, int], ActorHandle] = {}
        """Supervisors that this process has started, to be asked why they have died."""
        self._failed: frozenset[tuple[str, int]] = frozenset()
        """Attempts whose supervisor Ray could not create."""
        self._changed: Callable[[], None] = lambda: None
        self.address = self.ray_cluster = ""
        self._node_id = ""
        """The node of the raylet that this driver is attached to."""
        self._unanswered_since_mono: float | None = None
        """When the head began to accept connections without answering, monotonic time; None if it answers."""
        self._reserve = SupervisorReserve(RESERVED_S)

    def connect(self, address: str) -> None:
        """Becomes a driver of the cluster. The token of a protected one comes from the environment, as Ray reads it."""
        self.address = address
        try:
            ray.init(
                address=self.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,  # its warnings are about Ray, and do not help who runs jobs
                include_dashboard=False,
                ignore_reinit_error=True,
            )
        except (ConnectionError, RuntimeError, RayError) as error:
            raise ClusterUnreachable(f"no Ray cluster answers at {self.address}: {error}") from error
        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        if self.address == "auto":
            self.address = context.gcs_address
        try:
            self.ray_cluster = gcs.cluster_id()
        except GcsUnavailable as error:
            raise ClusterUnreachable(f"no Ray cluster answers at {self.address}: {error}") from error
        self._unanswered_since_mono = None
        self._reserve = SupervisorReserve(RESERVED_S)  # Ray uses processes only for the driver that requested them

    def disconnect(self) -> None:
        ray.shutdown()

    def snapshot(self) -> ClusterSnapshot:
        """Reads the cluster. Blocks for some seconds at most; if the head dies during the call, until it is back."""
        if not ray.is_initialized():
            raise ConnectionStale("the last attempt to connect failed")
        try:
            nodes = self._read_nodes()
        except ClusterUnreachable as error:
            if self._is_unknown():
                raise ConnectionStale(f"the head at {self.address} does not know this driver") from error
            raise
        if any(node.node_id == self._node_id and not node.alive for node in nodes):
            raise ConnectionStale(f"the raylet of this driver, on node {self._node_id}, is dead")
        actors = [actor for actor in gcs.actors() if actor.namespace == NAMESPACE]
        return ClusterSnapshot(
            nodes=nodes,
            free={node_id: _make_need(free) for node_id, free in gcs.available().items()},
            reservations=tuple(
                Reservation(actor.name, job_id, actor.node_id, _make_need(actor.resources), actor.is_alive)
                for actor in actors
                if (job_id := job_of_worker(actor.name)) is not None
            ),
            attempts=frozenset(key for actor in actors if (key := attempt_of(actor.name)) is not None),
            failed=self._failed,
        )

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._changed = changed
        watch = gcs.GcsNodeWatch()
        watch.start(lambda _: changed())
        return watch.stop

    def reconnect(self) -> None:
        """Connects anew. Takes up to some seconds."""
        ray.shutdown()
        self.connect(self.address)

    def _read_nodes(self) -> tuple[Node, ...]:
        """Reads Ray's node table, with the drains that Ray announces."""
        draining = gcs.draining()
        nodes = tuple(_make_node(node, draining) for node in gcs.nodes())
        self._unanswered_since_mono = None
        return nodes

    def _is_unknown(self) -> bool:
        """Return whether the head accepts connections and does not answer this driver, since it was restarted with
        other tables."""
        if not listens(self.address):
            self._unanswered_since_mono = None
        elif self._unanswered_since_mono is None:
            self._unanswered_since_mono = time.monotonic()
        since = self._unanswered_since_mono
        return since is not None and time.monotonic() - since > _UNANSWERED_S

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        """Starts the supervisor on none of these nodes, nor on the head's or a control plane's, if there are others."""
        stored = StoredConfig(gcs.GcsKeyValueStore(JOURNAL_NAMESPACE), config.job_id, config.attempt)
        config, is_other = stored.first(config.model_copy(update={"home": self._address_home(config.home)}))
        if is_other:  # it may have been started with another home
            self._kill(supervisor_name(config.job_id, config.attempt))
        self._start_supervisor(config, avoid_nodes)
        if places and config.forks_workers:
            self._prestart_workers(config, places)

    def _address_home(self, home: Home | None) -> Home | None:
        """The home with the address of the service, as the nodes of this cluster reach it."""
        address = self._home_address
        if home is None or address is None:
            return home
        return home.model_copy(update={"url": address.url, "ca": address.ca, "is_pinned": address.is_pinned})

    def _start_supervisor(self, config: SupervisorConfig, avoid_nodes: frozenset[str]) -> None:
        nodes = gcs.nodes()
        # A supervisor should survive the head's death. Nodes of control planes have no CPU to give, may have no torch,
        # and come and go with their server.
        others = {node.node_id for node in nodes if node.is_head or not _offers_work(node)}
        selectors = [{_NODE_LABEL: f"!in({','.join(sorted({*others, *avoid_nodes}))})"}, {_NODE_LABEL: "!in(none)"}]
        usable = {node.node_id for node in nodes if node.is_alive} - avoid_nodes
        ready = self._reserve.take(serialized_supervisor_environment(config), usable, time.monotonic())
        if ready:
            selectors.insert(0, {_NODE_LABEL: ready})
        key = config.job_id, config.attempt
        self._failed -= {key}
        actor = (
            ray.remote(self._supervisor_class)
            .options(
                name=supervisor_name(config.job_id, config.attempt),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                runtime_env=supervisor_environment(config),
                label_selector=selectors[0],
                fallback_strategy=[{"label_selector": selector} for selector in selectors[1:]],
            )
            .remote(config)
        )
        self._started[key] = actor
        created = actor.__ray_ready__.remote().future()
        created.add_done_callback(lambda done: self._note_creation(key, actor, done.exception()))

    def _note_creation(self, key: tuple[str, int], actor: ActorHandle, error: BaseException | None) -> None:
        """Notes an attempt whose supervisor Ray could not create. Called on a thread of Ray's. A supervisor that was
        killed meanwhile, or is another one by now, has not failed."""
        if isinstance(error, ActorDiedError) and self._started.get(key) is actor:
            self._failed |= {key}
            self._changed()

    def _prestart_workers(self, config: SupervisorConfig, places: Mapping[str, int]) -> None:
        environment = serialized_worker_environment(config)
        for node in gcs.nodes():
            if node.is_alive and (number := places.get(node.node_id, 0)):
                prestart(node, environment, number=number, keep_s=PATIENCE_S, working_dir=config.code_uri)

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        if not self._reserve.is_due(time.monotonic()):
            return
        nodes = {node.node_id: node for node in gcs.nodes() if node.is_alive and node.node_id not in avoid_nodes}
        usable = [name for name, node in nodes.items() if not node.is_head and _offers_work(node)] or [*nodes]
        if (due := self._reserve.renew(usable, time.monotonic())) is not None:
            node_id, environment = due
            prestart(nodes[node_id], environment, number=1, keep_s=RESERVED_S)

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None:
        try:
            ray.get_actor(supervisor_name(job_id, attempt), namespace=NAMESPACE)
            config = StoredConfig(gcs.GcsKeyValueStore(JOURNAL_NAMESPACE), job_id, attempt).read()
        except ValueError:
            return None
        return FoundSupervisor(dials_here=config is not None and config.home == self._address_home(config.home))

    def why_gone(self, job_id: str, attempt: int) -> str:
        """Return Ray's reason. It takes some seconds if a node has another release."""
        actor = self._started.pop((job_id, attempt), None)
        if actor is None:
            return ""
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=_FREE_S)
        except (ActorUnavailableError, GetTimeoutError):
            return ""
        except RayError as error:
            message = str(error)
            return f"{message}{asyncio.run(find_other_releases())}" if _NOT_CREATED in message else message
        return ""

    def silent_supervisor(self, job_id: str, attempt: int) -> str:
        try:
            nodes = gcs.nodes()  # first: Ray's own calls wait for a head that is away
            actor = ray.get_actor(supervisor_name(job_id, attempt), namespace=NAMESPACE)
            node_id = gcs.find_node(actor_id(actor))
            node = next((node for node in nodes if node.node_id == node_id and node.is_alive), None)
            if node is None or answers(node.ip, node.raylet_port, within_s=reachability.THRESHOLD_S):
                return ""
            gcs.nodes()  # the head answers, so it is not this host that is cut off
        except ValueError:
            return ""  # it has ended since; `find_supervisor` says so
        return node_id

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool:
        """Starts a supervisor in the place of a silent one. The head forgets the old actor at once, also if its process
        cannot be reached, and frees its name."""
        stored = StoredConfig(gcs.GcsKeyValueStore(JOURNAL_NAMESPACE), job_id, attempt)
        config = stored.read()
        if config is None:
            return False
        silent = (silent_node,) if silent_node else ()
        config = config.model_copy(update={"silent": silent, "home": self._address_home(home)})
        self._kill(supervisor_name(job_id, attempt), on_node=silent_node)
        stored.put(config.model_copy(update={"silent": ()}))
        self._start_supervisor(config, frozenset({*silent, *(node.node_id for node in config.avoid)}))
        return True

    def _kill(self, name: str, *, on_node: str = "") -> None:
        """Kills the actor of this name, if there is one. With `on_node`, only if it is on that node."""
        try:
            old = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return  # an earlier call was interrupted after the kill
        if not on_node or gcs.find_node(actor_id(old)) == on_node:
            ray.kill(old, no_restart=True)
            _wait_until_free(name)

    def unrecorded_starts(self, job_id: str, attempt: int) -> int:
        try:
            actor = ray.get_actor(supervisor_name(job_id, attempt), namespace=NAMESPACE)
            started = gcs.num_starts(actor_id(actor))
            recorded = num_lives(gcs.GcsKeyValueStore(JOURNAL_NAMESPACE), job_id, attempt)
        except ValueError:
            return 0  # it has ended since; `find_supervisor` says so
        return max(0, started - recorded)

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        try:
            actor = ray.get_actor(supervisor_name(job_id, attempt), namespace=NAMESPACE)
        except ValueError:
            return ()
        return gcs.read_ends(actor_id(actor), MAX_UNRECORDED_STARTS)

    def reap(self, job_id: str, attempt: int) -> int:
        """The supervisor is killed first, so that it does not replace the workers. Workers are asked to remove their
        snapshots before they are killed; the snapshots of a worker that does not answer are removed by the next
        attempt on its node."""
        prefix = supervisor_name(job_id, attempt).removesuffix("supervisor")
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        mine = sorted((n for n in names if n.startswith(prefix)), key=lambda n: not n.endswith("/supervisor"))
        handles, forgetting = [], []
        for name in mine:
            try:
                handles.append(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                continue  # it has ended since
            if name.endswith("/supervisor"):
                ray.kill(handles.pop(), no_restart=True)
            elif job_of_worker(name) is not None:
                forgetting.append(handles[-1].forget_snapshots.remote())
        if forgetting:
            ray.wait(forgetting, num_returns=len(forgetting), timeout=_FORGET_S)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        copies = gcs.GcsKeyValueStore(JOURNAL_NAMESPACE)
        GcsJournal(copies, job_id, attempt).delete()
        drop_unheld(copies)
        self._started.pop((job_id, attempt), None)
        self._failed -= {(job_id, attempt)}
        return len(mine)

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        """Takes seconds, and two and a half minutes at most."""
        actors = [_start_test(suspect.node_id, has_gpu=suspect.gpus > 0)]
        if partner is not None:
            actors.append(_start_test(partner, has_gpu=False))
        try:
            return await _run_test(actors, "cuda" if suspect.gpus else "cpu")
        except TimeoutError:
            return f"the test did not end within {_START_S + _TEST_S:.0f} s"
        except RayError as error:
            return f"the process of the test failed: {str(error).strip().splitlines()[0]}"
        finally:
            for actor in actors:
                ray.kill(actor, no_restart=True)

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        nodes = await self._list_working_nodes()
        calls = (call_on_node(node_id, _list_unused, for_s, within_s=_PACKAGES_S) for node_id, _ in nodes)
        return tuple(
            UnusedPackages(node_id, ip, name, num_bytes, unused_s)
            for (node_id, ip), answer in zip(nodes, await asyncio.gather(*calls), strict=True)
            for name, num_bytes, unused_s in answer or ()
        )

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        return bool(await call_on_node(node_id, _remove_unused, name, for_s, within_s=_PACKAGES_S))

    async def sees_storage(self, url: str, name: str) -> str:
        """Raises ClusterUnreachable if no node answers."""
        nodes = (await self._list_working_nodes())[:_MAX_ASKED]
        calls = (call_on_node(node_id, _why_unreadable, url, name, within_s=_STORAGE_S) for node_id, _ in nodes)
        answers = await asyncio.gather(*calls)
        if not any(isinstance(answer, str) for answer in answers):
            raise ClusterUnreachable(f"no node has said within {_STORAGE_S:g} s whether it reads {url}")
        return next((f"on the node {ip}, {why}" for (_, ip), why in zip(nodes, answers, strict=True) if why), "")

    async def _list_working_nodes(self) -> list[tuple[str, str]]:
        """Ids and addresses of the nodes that are alive, those with resources for workers if there are any."""
        nodes = [node for node in await asyncio.to_thread(self._read_nodes) if node.alive]
        return [(node.node_id, node.ip) for node in nodes if node.cpus or node.gpus] or [
            (node.node_id, node.ip) for node in nodes
        ]

    def request_room(self, workers: tuple[tuple[RoomKind, int], ...]) -> None:
        """The first version of Ray's autoscaler takes no notice of the labels."""
        kinds = [kind for kind, count in workers for _ in range(count)]
        try:
            request_resources(
                bundles=[_make_bundle(kind.need) for kind in kinds],
                bundle_label_selectors=[dict(kind.labels) for kind in kinds],
            )
        except (RpcError, RaySystemError) as error:
            raise ClusterUnreachable(f"the request to the autoscaler failed: {error}") from error

    def hold_code(self, job_id: str, attempt: int, sha256: str) -> str:
        uri = package_uri(sha256)
        return uri if _make_package(job_id, attempt, uri).hold() else ""

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:
        uri = package_uri(hash_archive(archive))
        _make_package(job_id, attempt, uri).store(archive)
        return uri


def _make_package(job_id: str, attempt: int, uri: str) -> CodePackage:
    packages, copies = gcs.GcsKeyValueStore(None), gcs.GcsKeyValueStore(JOURNAL_NAMESPACE)
    return CodePackage(packages, copies, job_id, attempt, uri)


def _wait_until_free(name: str) -> None:
    """Ray does not announce it, and frees the name of a killed actor within milliseconds."""
    give_up = time.monotonic() + _FREE_S
    while time.monotonic() < give_up:
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.02)
    raise ClusterUnreachable(f"Ray still has the actor {name}, {_FREE_S:g} s after it was killed")


def _offers_work(node: gcs.RayNode) -> bool:
    return bool(node.resources.get("CPU") or node.resources.get("GPU"))


def _make_node(node: gcs.RayNode, draining: dict[str, float | None]) -> Node:
    drain = None
    if node.is_alive and node.node_id in draining:
        drain = Drain(
            reason="drained by Ray", requested_at=time.time(), deadline=draining[node.node_id], source=DrainSource.RAY
        )
    return Node(
        node_id=node.node_id,
        ip=node.ip,
        alive=node.is_alive,
        cpus=float(node.resources.get("CPU", 0.0)),
        gpus=float(node.resources.get("GPU", 0.0)),
        memory_gib=float(node.resources.get("memory", 0.0)) / _GIB,
        labels=node.labels,
        drain=drain,
    )


def _make_bundle(need: WorkerNeed) -> dict[str, float]:
    amounts = {"CPU": need.cpus, "GPU": need.gpus, "memory": float(int(need.memory_gib * _GIB))}
    return {name: amount for name, amount in amounts.items() if amount}


def _make_need(resources: dict[str, float]) -> WorkerNeed:
    return WorkerNeed(
        cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0), memory_gib=resources.get("memory", 0.0) / _GIB
    )


_PACKAGES_S = 60.0
"""Time for the start of a process on a busy node, and for the removal of some thousand files."""
_STORAGE_S = 30.0
_MAX_ASKED = 16
_RELEASE_S = 15.0
_START_S = 90.0
"""Time for the start of a process that imports torch on a busy machine."""
_TEST_S = 60.0
_NOT_INSTALLED = "none"
_MAX_NAMED = 5


def _list_unused(for_s: float) -> list[tuple[str, int, float]]:
    """Runs on the node."""
    from shoal_workers.package_sets import root_of_node, unused

    return [
        (package_set.name, package_set.num_bytes, package_set.unused_s)
        for package_set in unused(root_of_node(), for_s=for_s)
    ]


def _remove_unused(name: str, for_s: float) -> bool:
    """Runs on the node."""
    from shoal_workers.package_sets import remove, root_of_node

    return remove(root_of_node(), name, for_s=for_s)


def _why_unreadable(url: str, name: str) -> str:
    """Runs on the node."""
    from shoal_service.supervisor.checkpoints import why_unreadable

    return why_unreadable(url, name)


async def find_other_releases() -> str:
    """Describe the nodes that have another release than this process; empty if none has. Takes some seconds."""

    def release() -> str:  # inside a function: it is sent as it is, since an older release has no such module
        from importlib import import_module

        try:
            return str(import_module("shoal_workers.version").VERSION)
        except (ImportError, AttributeError):
            return "none"

    try:
        nodes = [node for node in await asyncio.to_thread(gcs.nodes) if node.is_alive and node.resources.get("CPU")]
    except GcsUnavailable:
        return ""
    calls = (call_on_node(node.node_id, release, within_s=_RELEASE_S) for node in nodes)
    releases = dict(zip((node.ip for node in nodes), await asyncio.gather(*calls), strict=True))
    answered = {ip: version for ip, version in releases.items() if isinstance(version, str)}
    return describe_other_releases(VERSION, answered)


def describe_other_releases(local: str, releases: Mapping[str, str]) -> str:
    """Describe the nodes whose release is not the local one; empty if there are none.

    Args:
        releases: by address of the node; "none" if Shoal is not installed there.
    """
    others = {ip: version for ip, version in sorted(releases.items()) if version != local}
    if not others:
        return ""
    named = [f"{ip} has {'no Shoal' if version == _NOT_INSTALLED else version}" for ip, version in others.items()]
    more = f", and {count_text(len(named) - _MAX_NAMED, 'more node')}" if len(named) > _MAX_NAMED else ""
    return (
        f" The control plane is Shoal {local}, and {', '.join(named[:_MAX_NAMED])}{more}: "
        "install the same release on every node."
    )


async def call_on_node(node_id: str, function: Any, *arguments: Any, within_s: float) -> Any:
    """Runs the function on the node, and returns its result; None if the node does not answer, or the function
    raises."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    answer = task.remote(*arguments)
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except (TimeoutError, RayError):
        ray.cancel(answer, force=True)
        return None


class NodeTestActor:
    """One process on one node, for one test of it. It is pinned to the node, reserves nothing but a GPU if the node has
    one, and is killed at the end of the test.

    It returns errors as text: an exception of torch would make the control plane, which reads it, import torch.
    """

    def matmul(self, device: str) -> str:
        """Compute on the device. Return what was wrong; empty if nothing was."""
        from shoal_workers import node_test

        return _find_fault(lambda: node_test.matmul_fault(device))

    def listen_at(self) -> tuple[str, int]:
        """Return an address that the partner can reach."""
        with socket.socket() as chosen:
            host = ray.util.get_node_ip_address()
            chosen.bind((host, 0))
            return host, chosen.getsockname()[1]

    def pair(self, rank: int, host: str, port: int, round_name: str, timeout_s: float) -> str:
        from shoal_workers import node_test

        return _find_fault(lambda: node_test.pair_fault(rank, host, port, round_name=round_name, timeout_s=timeout_s))


def _find_fault(test: Callable[[], str]) -> str:
    """Run a test. Return what it has found; if it raises, the error."""
    try:
        return test()
    except Exception as error:  # whatever it is, the node has not passed
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


async def _run_test(actors: list[Any], device: str) -> str:
    """Test the node of the first actor, also together with that of the second. Return what was wrong; empty if
    nothing."""
    suspect = actors[0]
    async with asyncio.timeout(_START_S):
        fault: str = await suspect.matmul.remote(device)
    if fault or len(actors) == 1:
        return fault
    for order in ((0, 1), (1, 0)):
        async with asyncio.timeout(_START_S):
            host, port = await actors[order[0]].listen_at.remote()
        async with asyncio.timeout(_TEST_S):
            halves = [
                actors[number].pair.remote(rank, host, port, f"suspect-{order}", _TEST_S / 2)
                for rank, number in enumerate(order)
            ]
            faults: list[str] = await asyncio.gather(*halves)
        if any(faults):
            return next(filter(None, faults))
    return ""


def _start_test(node_id: str, *, has_gpu: bool) -> Any:
    return (
        ray.remote(NodeTestActor)
        .options(
            num_cpus=0,
            num_gpus=1 if has_gpu else 0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )


_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_SETUP_TIMEOUT_S = 600
"""Ray's own limit for the setup of a runtime environment."""
SETTLE_S = 5.0
_RENEWED_BEFORE_S = 20.0


def prestart(node: RayNode, environment: str, *, number: int, keep_s: float, working_dir: str | None = None) -> None:
    """Request idle processes from the node's raylet; does not wait for them, and raises nothing.

    Args:
        environment: the serialized runtime environment, exactly as Ray writes it for the actor.
        keep_s: how long the raylet keeps a process that it does not use.
        working_dir: the URI of the code package in `environment`.
    """
    request_idle_processes(
        f"{node.ip}:{node.raylet_port}",
        environment,
        job_id=ray.get_runtime_context().get_job_id(),
        number=number,
        keep_s=keep_s,
        working_dir=working_dir or "",
        setup_s=_SETUP_TIMEOUT_S,
        timeout_s=_TIMEOUT_S,
        failed=lambda error: _log.info("prestart.failed", extra={"node": node.node_id, "error": str(error)}),
    )


class SupervisorReserve:
    """Decides on which node one process waits for the next supervisor. Pure; the times are passed in.

    A new process is started a while after the last supervisor was, so that it takes no time from that job's own start.
    It is on another node each time, so that the supervisors of many jobs are not on one. No process waits until the
    first supervisor was started.
    """

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: a process that is not used ends after this time."""
        self._keep_s = keep_s
        self._environment = ""
        """The runtime environment of the last supervisor; the next one is expected to have the same."""
        self._node_id = ""
        self._reserved_for = ""
        """The environment of the process that waits."""
        self._last_node_id = ""
        self._ends_at = -math.inf
        self._renew_at = math.inf

    def take(self, environment: str, usable: Collection[str], now: float) -> str:
        """Uses up the process that waits, and returns its node; empty: no process fits this supervisor."""
        self._renew_at = now + SETTLE_S
        fits = environment == self._reserved_for and self._node_id in usable and now < self._ends_at
        self._environment = environment
        if not fits:
            return ""
        node_id, self._node_id = self._node_id, ""
        return node_id

    def is_due(self, now: float) -> bool:
        """Return whether `renew` may have something to do."""
        return now >= self._renew_at

    def renew(self, nodes: Sequence[str], now: float) -> tuple[str, str] | None:
        """Chooses where a process is started now: the node, and its runtime environment; None if none is to be started.

        Args:
            nodes: the usable nodes, in any order; the same ones in each call, except those that have come or gone.
        """
        if not self.is_due(now) or not nodes:
            return None
        is_fit = self._reserved_for == self._environment
        if is_fit and self._node_id in nodes and now < self._ends_at - _RENEWED_BEFORE_S:
            self._renew_at = self._ends_at - _RENEWED_BEFORE_S
            return None
        following = sorted(nodes)
        self._node_id = next((node for node in following if node > self._last_node_id), following[0])
        self._last_node_id, self._ends_at = self._node_id, now + self._keep_s
        self._reserved_for = self._environment
        self._renew_at = self._ends_at - _RENEWED_BEFORE_S
        return self._node_id, self._environment
