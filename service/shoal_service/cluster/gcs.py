"""Reads and writes the head's tables (Ray's GCS) with a deadline: nodes, announced drains, actors and how their
processes have ended, the key-value store.

Ray's public calls wait for a head that is away, for minutes if necessary. The calls here raise GcsUnavailable after two
seconds. Called by the supervisor and by `gateway/ray_cluster.py`. The client of the GCS is not a public interface, see
`shoal_workers/ray_internals.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from ray.exceptions import RaySystemError, RpcError

import ray
from ray import ActorID
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_workers import ray_internals

_log = logging.getLogger(__name__)
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RayNode:
    """One row of Ray's node table."""

    node_id: str
    ip: str
    is_alive: bool
    is_head: bool
    resources: dict[str, float] = field(default_factory=dict)
    """Totals; empty for a dead node."""
    raylet_port: int = 0
    """The port of its raylet, at `ip`."""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RayActor:
    """An actor that is alive, or that Ray is creating."""

    name: str
    namespace: str
    node_id: str
    """Where it is, or where Ray tries to create it."""
    is_alive: bool
    resources: dict[str, float] = field(default_factory=dict)
    """What it reserves, or will reserve."""


def cluster_id() -> str:
    """Id of the cluster that this process is connected to, in hexadecimal digits. A head that is started again has the
    same id if it finds its tables."""
    return str(_open_client().cluster_id.hex())


def nodes() -> tuple[RayNode, ...]:
    """Every node of the cluster, dead ones included."""
    return tuple(_make_node(info) for info in _call("get_all_node_info").values())


def draining() -> dict[str, float | None]:
    """Nodes that Ray itself drains (`ray drain-node`, the autoscaler, a preemption): by node id, the wall-clock time at
    which the node goes away; None means unknown."""
    with _open_request() as client:
        draining_nodes = ray_internals.draining_nodes(client, ray.get_runtime_context().gcs_address, _TIMEOUT_S)
    return {node_id: deadline_ms / 1000 if deadline_ms > 0 else None for node_id, deadline_ms in draining_nodes.items()}


def available() -> dict[str, dict[str, float]]:
    """Unreserved resources of each live node, by node id. Nodes report changes after about 0.1 s."""
    reply = _call("get_all_resource_usage")
    return {node.node_id.hex(): dict(node.resources_available) for node in reply.resource_usage_data.batch}


def actors() -> tuple[RayActor, ...]:
    """Every actor of the cluster that is alive or is being created. Not from the thread of an event loop."""
    # the head filters by one state at a time; the dead ones may be many
    infos = _read_actors({"actor_state_name": "PENDING_CREATION"}, {"actor_state_name": "ALIVE"})
    return tuple(_make_actor(info) for info in infos.values())


def num_starts(actor_id: str) -> int:
    """Processes that Ray has started for an actor so far; 0: none, or the head does not know the actor. Not from the
    thread of an event loop."""
    info = _read_actor(actor_id)
    if info is None or ray_internals.is_unstarted_actor(info):
        return 0
    return int(info.num_restarts) + 1


def find_node(actor_id: str) -> str:
    """The node of an actor that is alive; empty: it is not. Not from the thread of an event loop."""
    info = _read_actor(actor_id)
    if info is None or not ray_internals.is_alive_actor(info):
        return ""
    return str(info.address.node_id.hex())


def read_ends(actor_id: str, last: int) -> tuple[ProcessEnd, ...]:
    """How the last processes of an actor before its present one have ended, oldest first; fewer if the head does not
    know more. A supervisor that died again and again asks, to say why. Blocks for some seconds at most. Not from the
    thread of an event loop."""
    try:
        info = _read_actor(actor_id)
        before = info.previous_incarnations if info is not None else ()  # ten at most, oldest first
        worker_ids = [incarnation.worker_id for incarnation in before][-last:]
        ends = ray_internals.ends_of_processes(ray.get_runtime_context().gcs_address, worker_ids, _TIMEOUT_S)
        return tuple(ProcessEnd(lacked_memory, message) for lacked_memory, message in ends)
    except (GcsUnavailable, grpc.RpcError) as error:
        _log.warning("process_ends.unknown", extra={"error": str(error)})
        return ()


async def died_at(actor_id: str) -> float | None:
    """Wall-clock time at which the actor's node reported the death of its process to the head; None means unknown."""
    client = ray_internals.head()
    if client is None:
        return None
    key = ActorID.from_hex(actor_id)
    try:
        infos = await client.async_get_all_actor_info(actor_id=key, timeout=_TIMEOUT_S)
    except (RpcError, RaySystemError):
        return None
    return infos[key].end_time / 1000 if key in infos and infos[key].end_time else None


class GcsKeyValueStore:
    """One namespace of the head's key-value store; None means the one in which Ray keeps its packages."""

    def __init__(self, namespace: bytes | None) -> None:
        self._namespace = namespace

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = _call("internal_kv_get", key, self._namespace)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        _call("internal_kv_put", key, value, True, self._namespace)

    def add(self, key: bytes, value: bytes) -> bool:
        """Puts only if the key is absent; False: it is there. The head decides, so of two callers one gets True."""
        return bool(_call("internal_kv_put", key, value, False, self._namespace))

    def keys(self, prefix: bytes) -> list[bytes]:
        return list(_call("internal_kv_keys", prefix, self._namespace))

    def delete(self, key: bytes) -> None:
        _call("internal_kv_del", key, False, self._namespace)

    def delete_all(self, prefix: bytes) -> None:
        _call("internal_kv_del", prefix, True, self._namespace)


def _read_actor(actor_id: str) -> Any:
    """Read what the head knows of the actor; None if it does not know it."""
    key = ActorID.from_hex(actor_id)
    return _read_actors({"actor_id": key}).get(key)


def _read_actors(*filters: dict[str, Any]) -> dict[ActorID, Any]:
    """Read the actors that one of the filters selects. Where they differ about an actor, the last one counts."""

    async def read(client: Any) -> dict[ActorID, Any]:
        calls = [client.async_get_all_actor_info(timeout=_TIMEOUT_S, **selection) for selection in filters]
        return {key: info for infos in await asyncio.gather(*calls) for key, info in infos.items()}

    with _open_request() as client:
        return asyncio.run(read(client))


def _call(method: str, *arguments: Any) -> Any:
    with _open_request() as client:
        return getattr(client, method)(*arguments, timeout=_TIMEOUT_S)


def _open_client() -> Any:
    """Ray's own client of the head. Raises GcsUnavailable if this process has none."""
    client = ray_internals.head()
    if client is None:
        raise GcsUnavailable("not connected to a Ray cluster")
    return client


@contextmanager
def _open_request() -> Iterator[Any]:
    """The client for one request. Every way in which the head may not answer becomes GcsUnavailable."""
    client = _open_client()
    try:
        yield client
    except (RpcError, RaySystemError, grpc.RpcError) as error:
        raise GcsUnavailable(f"the Ray head did not answer within {_TIMEOUT_S:g} s: {error}") from error


def _make_node(info: Any) -> RayNode:
    return RayNode(
        node_id=info.node_id.hex(),
        ip=info.node_manager_address,
        is_alive=ray_internals.is_alive_node(info),
        is_head=info.is_head_node,
        resources=dict(info.resources_total),
        raylet_port=info.node_manager_port,
        labels=dict(info.labels),
    )


def _make_actor(info: Any) -> RayActor:
    return RayActor(
        name=info.name,
        namespace=info.ray_namespace,
        node_id=info.address.node_id.hex(),
        is_alive=ray_internals.is_alive_actor(info),
        resources=dict(info.required_resources),
    )


_PERIOD_S = 0.5


class GcsNodeWatch:
    """Reports to an executor which nodes have died and which ones Ray drains. The real `protocols.NodeWatch`.

    The death of one worker is found by its failing call. The death of a node is declared by the head, after its health
    checks; with the node table all workers of that node are lost in one event instead of one after the other. The watch
    reads the table every half second, on a thread of its own, so a head that does not answer delays nothing else.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()

    def start(self, report: Callable[[NodeTable], None]) -> None:
        threading.Thread(target=self._run, args=(report,), name="node-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch. Does not wait for a request that is under way."""
        self._stop.set()

    def dead_nodes(self) -> frozenset[str]:
        try:
            return _read_table().dead
        except GcsUnavailable:
            return frozenset()

    def _run(self, report: Callable[[NodeTable], None]) -> None:
        last = NodeTable()
        answers = True
        while not self._stop.wait(_PERIOD_S):
            try:
                table = _read_table()
            except GcsUnavailable as error:
                if answers:
                    _log.warning("ray_head.away", extra={"error": str(error)})
                answers = False
                continue
            answers = True
            if table != last and not self._stop.is_set():
                last = table
                report(table)


def _read_table() -> NodeTable:
    rows = nodes()
    return NodeTable(
        dead=frozenset(node.node_id for node in rows if not node.is_alive),
        draining=draining(),
        head=next((node.node_id for node in rows if node.is_head and node.is_alive), ""),
        raylets={node.node_id: (node.ip, node.raylet_port) for node in rows if node.is_alive},
    )
