"""Calls functions on nodes, as Ray tasks that reserve nothing, where only the node itself can answer.

    packages of `code.pip`   listed and removed: they are local files of the workers, with whose account the tasks run
    releases of Shoal        asked for when a supervisor could not be created: a node with another release is the most
                             probable reason, and no error of Ray names it

Called by `RayCluster`. A node that does not answer in time is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.clusters.snapshot import UnusedPackages
from shoal_service.core.quantities import count_text
from shoal_workers.version import VERSION

_PACKAGES_S = 60.0
"""Time for the start of a process on a busy node, and for the removal of some thousand files."""
_RELEASE_S = 15.0
_NONE = "none"
_MOST = 5


async def unused_packages(nodes: Sequence[tuple[str, str]], for_s: float) -> tuple[UnusedPackages, ...]:
    """Packages that no process has used for at least `for_s`. Nodes that do not answer are left out.

    Args:
        nodes: ids and addresses.
        for_s: seconds without use.
    """
    answers = await asyncio.gather(
        *(call_on_node(node_id, _list_unused, for_s, within_s=_PACKAGES_S) for node_id, _ in nodes)
    )
    return tuple(
        UnusedPackages(node_id, ip, name, num_bytes, unused_s)
        for (node_id, ip), found in zip(nodes, answers, strict=True)
        for name, num_bytes, unused_s in found or ()
    )


async def remove_packages(node_id: str, name: str, for_s: float) -> bool:
    return bool(await call_on_node(node_id, _remove, name, for_s, within_s=_PACKAGES_S))


def _list_unused(for_s: float) -> list[tuple[str, int, float]]:
    """Runs on the node."""
    from shoal_workers.package_sets import root_of_node, unused

    return [(one.name, one.num_bytes, one.unused_s) for one in unused(root_of_node(), for_s=for_s)]


def _remove(name: str, for_s: float) -> bool:
    """Runs on the node."""
    from shoal_workers.package_sets import remove, root_of_node

    return remove(root_of_node(), name, for_s=for_s)


async def other_releases() -> str:
    """Says which nodes have another release than this process; empty if none has. Takes some seconds."""

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
    found = dict(zip((node.ip for node in nodes), await asyncio.gather(*calls), strict=True))
    return words_of(VERSION, {ip: version for ip, version in found.items() if isinstance(version, str)})


def words_of(own: str, releases: Mapping[str, str]) -> str:
    """The same in words. `releases`: by address of the node; "none": Shoal is not installed there."""
    others = {ip: version for ip, version in sorted(releases.items()) if version != own}
    if not others:
        return ""
    named = [f"{ip} has {'no Shoal' if version == _NONE else version}" for ip, version in others.items()]
    more = f", and {count_text(len(named) - _MOST, 'more node')}" if len(named) > _MOST else ""
    return (
        f" The control plane is Shoal {own}, and {', '.join(named[:_MOST])}{more}: "
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
