"""The releases of Shoal on the nodes, asked for when a supervisor could not be created: a node with another release is
the most probable reason, and no error of Ray names it. Called by `ray_cluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.quantities import count_text
from shoal_service.gateway.on_node import call_on_node
from shoal_workers.version import VERSION

_ANSWER_S = 15.0
_NONE = "none"
_MOST = 5


async def other_releases() -> str:
    """A sentence if nodes have another release than this process; else empty. Takes some seconds."""

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
    calls = (call_on_node(node.node_id, release, within_s=_ANSWER_S) for node in nodes)
    found = dict(zip((node.ip for node in nodes), await asyncio.gather(*calls), strict=True))
    return words_of(VERSION, {ip: version for ip, version in found.items() if isinstance(version, str)})


def words_of(own: str, releases: Mapping[str, str]) -> str:
    """`releases`: by address of the node; "none": Shoal is not installed there."""
    others = {ip: version for ip, version in sorted(releases.items()) if version != own}
    if not others:
        return ""
    named = [f"{ip} has {'no Shoal' if version == _NONE else version}" for ip, version in others.items()]
    more = f", and {count_text(len(named) - _MOST, 'more node')}" if len(named) > _MOST else ""
    return (
        f" The control plane is Shoal {own}, and {', '.join(named[:_MOST])}{more}: "
        "install the same release on every node."
    )
