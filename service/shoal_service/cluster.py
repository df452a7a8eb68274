"""Cluster: the control plane's way to Ray. Connects, looks at nodes, starts and finds supervisors; decides nothing."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

import ray
from shoal_service.supervisor.actor import CONCURRENCY_GROUPS, SupervisorActor
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.views import NodeView, SupervisorNews
from shoal_workers.contract.ids import NAMESPACE, supervisor_name

_GIB = 1 << 30


class SupervisorGone(Exception):
    """No supervisor of that job attempt is alive in the cluster."""


class ClusterUnreachable(Exception):
    """Ray does not answer."""


class SupervisorHandle:
    """One attempt's supervisor, wherever it lives."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def pull(self, after: int, wait_s: float, epoch: int) -> SupervisorNews:
        """News since `after`.

        Raises:
            SupervisorGone: the actor is dead for good (Ray restarts it otherwise).
        """
        try:
            news: SupervisorNews = await self._actor.pull.remote(after, wait_s, epoch)
        except RayActorError as error:
            raise SupervisorGone(str(error)) from error
        return news

    async def direct(self, directive: Directive) -> None:
        try:
            await self._actor.direct.remote(directive)
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

    def disconnect(self) -> None:
        ray.shutdown()

    @property
    def connected(self) -> bool:
        return bool(ray.is_initialized())

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(_node_view(node) for node in ray.nodes())

    def free(self) -> dict[str, float]:
        resources: dict[str, float] = ray.available_resources()
        return resources

    def start_supervisor(self, config: SupervisorConfig) -> SupervisorHandle:
        """Idempotent: an attempt has one supervisor, whoever asks for it."""
        actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(SupervisorActor)
        actor = actor_class.options(
            name=supervisor_name(config.job_id, config.attempt),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
        ).remote(config)
        return SupervisorHandle(actor)

    def find_supervisor(self, job_id: str, attempt: int) -> SupervisorHandle | None:
        try:
            return SupervisorHandle(ray.get_actor(supervisor_name(job_id, attempt), namespace=NAMESPACE))
        except ValueError:
            return None

    def reap(self, job_id: str, attempt: int) -> int:
        """Kill what is left of an attempt: its supervisor first, so that it replaces nothing. Returns how many."""
        prefix = supervisor_name(job_id, attempt).removesuffix("supervisor")
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        mine = sorted((n for n in names if n.startswith(prefix)), key=lambda n: not n.endswith("/supervisor"))
        for name in mine:
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            except ValueError:
                continue  # gone meanwhile
        return len(mine)

    def upload_code(self, archive: bytes) -> str:
        """Put a zip archive where the shards' runtime environments fetch it from; the same bytes, the same URI."""
        from ray._private.runtime_env.packaging import upload_package_to_gcs

        uri = f"gcs://_ray_pkg_{hashlib.sha256(archive).hexdigest()[:32]}.zip"
        upload_package_to_gcs(uri, archive)
        return uri


def _node_view(node: dict[str, Any]) -> NodeView:
    resources = node.get("Resources", {})
    return NodeView(
        node_id=node["NodeID"],
        ip=node["NodeManagerAddress"],
        alive=node["Alive"],
        cpus=float(resources.get("CPU", 0.0)),
        gpus=float(resources.get("GPU", 0.0)),
        memory_gib=float(resources.get("memory", 0.0)) / _GIB,
    )
