"""Cluster: the control plane's way to Ray. Connects, looks at nodes, starts and finds supervisors; decides nothing."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.node_test import fault_of_node
from shoal_service.cluster.process_sessions import listens
from shoal_service.core.nodes import Drain, Node
from shoal_service.reports import SupervisorReports
from shoal_service.supervisor.actor import CONCURRENCY_GROUPS, SupervisorActor
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.journal import Journal
from shoal_workers.contract.ids import NAMESPACE, supervisor_name

_GIB = 1 << 30
_NODE_LABEL = "ray.io/node-id"
_FORGET_S = 2.0
_FORGOTTEN_S = 5.0
"""A head that was restarted takes up its old clients within a second or two."""


class SupervisorGone(Exception):
    """No supervisor of that job attempt is alive in the cluster."""


class SupervisorUnavailable(Exception):
    """It does not answer now: it is being restarted, or cannot be reached. Ask again."""


class ClusterUnreachable(Exception):
    """Ray does not answer."""


class ConnectionStale(Exception):
    """A driver outlives the head, and even the raylet that it is attached to. But without that one it cannot start
    anything, and a head that came back with other tables does not know it: then it has to connect anew."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at one moment."""

    nodes: tuple[Node, ...]
    free: dict[str, float]
    """Resources that nobody holds, over all nodes."""


class SupervisorHandle:
    """One attempt's supervisor, wherever it lives."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def pull(self, after: int, wait_s: float, epoch: int) -> SupervisorReports:
        """News since `after`.

        Raises:
            SupervisorGone: the actor is dead for good (Ray restarts it otherwise).
            SupervisorUnavailable
        """
        try:
            news: SupervisorReports = await self._actor.pull.remote(after, wait_s, epoch)
        except ActorUnavailableError as error:
            raise SupervisorUnavailable(str(error)) from error
        except RayActorError as error:
            raise SupervisorGone(str(error)) from error
        return news

    async def direct(self, directive: Directive) -> None:
        try:
            await self._actor.direct.remote(directive)
        except ActorUnavailableError as error:
            raise SupervisorUnavailable(str(error)) from error
        except RayActorError as error:
            raise SupervisorGone(str(error)) from error

    async def release(self, epoch: int) -> None:
        try:
            await self._actor.release.remote(epoch)
        except RayError:
            pass  # already gone: its journal entry goes with the next clean-up
        ray.kill(self._actor, no_restart=True)


class Cluster:
    """A connection to one Ray cluster. `connect` first; every method may raise ClusterUnreachable."""

    def __init__(self) -> None:
        self.address = ""
        self._node_id = ""
        """Of the raylet that this driver is attached to."""
        self._unanswered_since_mono: float | None = None
        """Since when the head has been listening without answering."""

    def connect(self, address: str) -> None:
        """Become a driver of the cluster. The token of a protected one comes from the environment, as Ray reads it."""
        self.address = address
        try:
            ray.init(
                address=self.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.WARNING,
                include_dashboard=False,
                ignore_reinit_error=True,
            )
        except (ConnectionError, RuntimeError, RayError) as error:
            raise ClusterUnreachable(f"no Ray cluster answers at {self.address}: {error}") from error
        self._node_id = ray.get_runtime_context().get_node_id()
        self._unanswered_since_mono = None

    def disconnect(self) -> None:
        ray.shutdown()

    @property
    def connected(self) -> bool:
        return bool(ray.is_initialized())

    def look(self) -> ClusterSnapshot:
        """Blocks for some seconds at most, unless the head dies in this very moment; then until it is back.

        Raises:
            ConnectionStale: `reconnect`.
            ClusterUnreachable: the head is away.
        """
        if not ray.is_initialized():
            raise ConnectionStale("the last attempt to connect has failed")
        try:
            nodes = self._nodes()
        except ClusterUnreachable as error:
            if self._is_forgotten():
                raise ConnectionStale(f"the head listens at {self.address}, and does not know this driver") from error
            raise
        if any(node.node_id == self._node_id and not node.alive for node in nodes):
            raise ConnectionStale(f"the raylet of this driver, on node {self._node_id}, is dead")
        return ClusterSnapshot(nodes=nodes, free=ray.available_resources())

    def reconnect(self) -> None:
        """Every handle from before is worth nothing afterwards: nobody may be using one. Takes up to some seconds."""
        ray.shutdown()
        self.connect(self.address)

    def _nodes(self) -> tuple[Node, ...]:
        """As Ray sees them, with the drains that it announces."""
        try:
            draining = gcs.draining()
            nodes = tuple(_node(node, draining) for node in gcs.nodes())
        except gcs.GcsUnavailable as error:
            raise ClusterUnreachable(str(error)) from error
        self._unanswered_since_mono = None
        return nodes

    def _is_forgotten(self) -> bool:
        """The head listens, and still does not answer this driver: it is another one."""
        if not listens(self.address):
            self._unanswered_since_mono = None
        elif self._unanswered_since_mono is None:
            self._unanswered_since_mono = time.monotonic()
        since = self._unanswered_since_mono
        return since is not None and time.monotonic() - since > _FORGOTTEN_S

    def start_supervisor(self, config: SupervisorConfig, *, avoid_nodes: frozenset[str]) -> SupervisorHandle:
        """Idempotent: an attempt has one supervisor, whoever asks for it.

        Where there are others, it is kept off the head, whose death it shall survive, and off nodes to be left.
        """
        try:
            heads = {node.node_id for node in gcs.nodes() if node.is_head}
        except gcs.GcsUnavailable as error:
            raise ClusterUnreachable(str(error)) from error
        actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(SupervisorActor)
        actor = actor_class.options(
            name=supervisor_name(config.job_id, config.attempt),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            label_selector={_NODE_LABEL: f"!in({','.join(sorted({*heads, *avoid_nodes}))})"},
            fallback_strategy=[{"label_selector": {_NODE_LABEL: "!in(none)"}}],
        ).remote(config)
        return SupervisorHandle(actor)

    def find_supervisor(self, job_id: str, attempt: int) -> SupervisorHandle | None:
        try:
            return SupervisorHandle(ray.get_actor(supervisor_name(job_id, attempt), namespace=NAMESPACE))
        except ValueError:
            return None

    def reap(self, job_id: str, attempt: int) -> int:
        """Kill what is left of an attempt: its supervisor first, so that it replaces nothing. Returns how many.

        Shards are asked to remove their snapshots before; one that does not answer leaves them to the next on its node.
        """
        prefix = supervisor_name(job_id, attempt).removesuffix("supervisor")
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        mine = sorted((n for n in names if n.startswith(prefix)), key=lambda n: not n.endswith("/supervisor"))
        handles = []
        for name in mine:
            try:
                handles.append(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                continue  # gone meanwhile
            if name.endswith("/supervisor"):
                ray.kill(handles.pop(), no_restart=True)
        if handles:
            ray.wait([handle.forget_memory.remote() for handle in handles], num_returns=len(handles), timeout=_FORGET_S)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        Journal(job_id, attempt).delete()
        return len(mine)

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        """The probation test of a node: what was wrong; empty: it passed. Takes some seconds."""
        return await fault_of_node(suspect.node_id, partner, has_gpu=suspect.gpus > 0)

    def upload_code(self, archive: bytes) -> str:
        """Put a zip archive where the shards' runtime environments fetch it from; the same bytes, the same URI."""
        from ray._private.runtime_env.packaging import upload_package_to_gcs

        uri = f"gcs://_ray_pkg_{hashlib.sha256(archive).hexdigest()[:32]}.zip"
        upload_package_to_gcs(uri, archive)
        return uri


def _node(node: gcs.RayNode, draining: dict[str, float | None]) -> Node:
    drain = None
    if node.is_alive and node.node_id in draining:
        drain = Drain(reason="drained by Ray", requested_at=time.time(), deadline=draining[node.node_id], source="ray")
    return Node(
        node_id=node.node_id,
        ip=node.ip,
        alive=node.is_alive,
        cpus=float(node.resources.get("CPU", 0.0)),
        gpus=float(node.resources.get("GPU", 0.0)),
        memory_gib=float(node.resources.get("memory", 0.0)) / _GIB,
        drain=drain,
    )
