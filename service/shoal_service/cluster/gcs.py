"""The head's tables (Ray's GCS), read and written with a deadline: nodes, announced drains, the key-value store.

Ray's public calls wait for a head that is away, minutes if need be. Nothing here does: whoever asks gets GcsUnavailable
after a second or two, and goes on without an answer. Used by the supervisor and by `cluster.py`; the only file that
knows Ray's client of the GCS, which is not a public interface (ray is pinned).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.core.generated import gcs_pb2
from ray.exceptions import RaySystemError, RpcError
from ray.experimental import internal_kv

from ray import ActorID

_TIMEOUT_S = 2.0


class GcsUnavailable(Exception):
    """The head did not answer in time."""


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
    """Where its raylet listens, at `ip`."""


def nodes(timeout_s: float = _TIMEOUT_S) -> tuple[RayNode, ...]:
    """Every node that the cluster has, and those that died."""
    return tuple(_node(info) for info in _ask("get_all_node_info", timeout=timeout_s).values())


def draining(timeout_s: float = _TIMEOUT_S) -> dict[str, float | None]:
    """Nodes that Ray itself drains (`ray drain-node`, the autoscaler, a preemption): by id, the wall-clock time at
    which they go away, if that is known."""
    found: dict[str, int] = _ask("get_draining_nodes", timeout=timeout_s)
    return {node_id: deadline_ms / 1000 if deadline_ms > 0 else None for node_id, deadline_ms in found.items()}


async def died_at(actor_id: str, timeout_s: float = _TIMEOUT_S) -> float | None:
    """Wall-clock time at which the head heard from the actor's node that its process is dead; None: not known."""
    client = internal_kv.internal_kv_get_gcs_client()
    if client is None:
        return None
    key = ActorID.from_hex(actor_id)
    try:
        found = await client.async_get_all_actor_info(actor_id=key, timeout=timeout_s)
    except (RpcError, RaySystemError):
        return None
    return found[key].end_time / 1000 if key in found and found[key].end_time else None


def kv_get(key: bytes, namespace: bytes, timeout_s: float = _TIMEOUT_S) -> bytes | None:
    value: bytes | None = _ask("internal_kv_get", key, namespace, timeout=timeout_s)
    return value


def kv_put(key: bytes, value: bytes, namespace: bytes, timeout_s: float = _TIMEOUT_S) -> None:
    _ask("internal_kv_put", key, value, True, namespace, timeout=timeout_s)


def kv_delete(key: bytes, namespace: bytes, timeout_s: float = _TIMEOUT_S) -> None:
    _ask("internal_kv_del", key, False, namespace, timeout=timeout_s)


def _ask(method: str, *arguments: Any, timeout: float) -> Any:
    client = internal_kv.internal_kv_get_gcs_client()
    if client is None:
        raise GcsUnavailable("not connected to a Ray cluster")
    try:
        return getattr(client, method)(*arguments, timeout=timeout)
    except (RpcError, RaySystemError) as error:
        raise GcsUnavailable(f"the Ray head did not answer within {timeout:g} s: {error}") from error


def _node(info: Any) -> RayNode:
    return RayNode(
        node_id=info.node_id.hex(),
        ip=info.node_manager_address,
        is_alive=info.state == gcs_pb2.GcsNodeInfo.ALIVE,
        is_head=info.is_head_node,
        resources=dict(info.resources_total),
        raylet_port=info.node_manager_port,
    )
