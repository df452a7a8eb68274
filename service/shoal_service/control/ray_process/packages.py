"""Packages of `code.pip` on the nodes, looked at and removed by a Ray task on each node, since they are local files.

Called by `RayCluster`. The tasks reserve nothing, and run with the account of the workers, whose files these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from shoal_service.control.protocols import UnusedPackages

_ANSWER_S = 60.0
"""The start of a process on a busy node, and the removal of some thousand files."""


async def unused_packages(nodes: Sequence[tuple[str, str]], for_s: float) -> tuple[UnusedPackages, ...]:
    """`nodes`: ids and addresses. Those that do not answer are left out."""
    answers = await asyncio.gather(*(_ask(node_id, _list_unused, for_s) for node_id, _ in nodes))
    return tuple(
        UnusedPackages(node_id, ip, name, num_bytes, unused_s)
        for (node_id, ip), found in zip(nodes, answers, strict=True)
        for name, num_bytes, unused_s in found or ()
    )


async def remove_packages(node_id: str, name: str, for_s: float) -> bool:
    return bool(await _ask(node_id, _remove, name, for_s))


async def _ask(node_id: str, function: Any, *arguments: Any) -> Any:
    """None: the node does not answer."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    answer = task.remote(*arguments)
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await answer
    except (TimeoutError, RayError):
        ray.cancel(answer, force=True)
        return None


def _list_unused(for_s: float) -> list[tuple[str, int, float]]:
    """On the node."""
    from shoal_workers.package_sets.directories import root_of_node, unused

    return [(one.name, one.num_bytes, one.unused_s) for one in unused(root_of_node(), for_s=for_s)]


def _remove(name: str, for_s: float) -> bool:
    """On the node."""
    from shoal_workers.package_sets.directories import remove, root_of_node

    return remove(root_of_node(), name, for_s=for_s)
