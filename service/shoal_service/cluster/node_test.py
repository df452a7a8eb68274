"""The probation test of a node: an actor on the suspected node, and one on a partner node, compute and communicate.

Called by `gateway/ray_cluster.py` for the control loop. The actors are pinned to their nodes, reserve
nothing but a GPU if the node has one, and are killed at the end of every test.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray

_START_S = 90.0
"""Time for the start of a process that imports torch on a busy machine."""
_TEST_S = 60.0


class NodeTestActor:
    """One process on one node, for one test.

    It answers in words: an exception of torch would make the control plane, which reads it, import torch.
    """

    def matmul(self, device: str) -> str:
        """Computes on the device; says what was wrong, empty if nothing was."""
        from shoal_workers import node_test

        return _in_words(lambda: node_test.matmul_fault(device))

    def listen_at(self) -> tuple[str, int]:
        """An address that the partner can reach."""
        with socket.socket() as chosen:
            host = ray.util.get_node_ip_address()
            chosen.bind((host, 0))
            return host, chosen.getsockname()[1]

    def pair(self, rank: int, host: str, port: int, round_name: str, timeout_s: float) -> str:
        from shoal_workers import node_test

        return _in_words(lambda: node_test.pair_fault(rank, host, port, round_name=round_name, timeout_s=timeout_s))


def _in_words(test: Callable[[], str]) -> str:
    try:
        return test()
    except Exception as error:  # whatever it is, the node has not passed
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


async def fault_of_node(suspect: str, partner: str | None, *, has_gpu: bool) -> str:
    """Tests the suspected node, and says what was wrong; empty if it passed. Takes seconds, and two and a half minutes
    at most."""
    actors = [_start(suspect, has_gpu=has_gpu)]
    if partner is not None:
        actors.append(_start(partner, has_gpu=False))
    try:
        return await _test(actors, "cuda" if has_gpu else "cpu")
    except TimeoutError:
        return f"the test did not end within {_START_S + _TEST_S:.0f} s"
    except RayError as error:
        return f"the process of the test failed: {str(error).strip().splitlines()[0]}"
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


async def _test(actors: list[Any], device: str) -> str:
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


def _start(node_id: str, *, has_gpu: bool) -> Any:
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
