"""A function that is called on one node, as a Ray task that reserves nothing. Used by `packages` and `releases`."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray


async def call_on_node(node_id: str, function: Any, *arguments: Any, within_s: float) -> Any:
    """None: the node does not answer, or the function raises."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    answer = task.remote(*arguments)
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except (TimeoutError, RayError):
        ray.cancel(answer, force=True)
        return None
