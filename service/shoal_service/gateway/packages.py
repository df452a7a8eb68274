"""Packages of `code.pip` on the nodes, looked at and removed by a Ray task on each node, since they are local files.

Called by `RayCluster`. The tasks reserve nothing, and run with the account of the workers, whose files these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal_service.clusters.snapshot import UnusedPackages
from shoal_service.gateway.on_node import call_on_node

_ANSWER_S = 60.0
"""The start of a process on a busy node, and the removal of some thousand files."""


async def unused_packages(nodes: Sequence[tuple[str, str]], for_s: float) -> tuple[UnusedPackages, ...]:
    """`nodes`: ids and addresses. Those that do not answer are left out."""
    answers = await asyncio.gather(
        *(call_on_node(node_id, _list_unused, for_s, within_s=_ANSWER_S) for node_id, _ in nodes)
    )
    return tuple(
        UnusedPackages(node_id, ip, name, num_bytes, unused_s)
        for (node_id, ip), found in zip(nodes, answers, strict=True)
        for name, num_bytes, unused_s in found or ()
    )


async def remove_packages(node_id: str, name: str, for_s: float) -> bool:
    return bool(await call_on_node(node_id, _remove, name, for_s, within_s=_ANSWER_S))


def _list_unused(for_s: float) -> list[tuple[str, int, float]]:
    """Runs on the node."""
    from shoal_workers.package_sets import root_of_node, unused

    return [(one.name, one.num_bytes, one.unused_s) for one in unused(root_of_node(), for_s=for_s)]


def _remove(name: str, for_s: float) -> bool:
    """Runs on the node."""
    from shoal_workers.package_sets import remove, root_of_node

    return remove(root_of_node(), name, for_s=for_s)
