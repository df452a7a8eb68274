"""What the `run` orders of a group cost its supervisor, through Ray: CPU seconds and bytes.

    python bench/scale/orders.py [--ranks 64,1024,4096] [--orders 256]

A group that restores from memory is told a server for each part of the snapshot, and there is a part for each rank. The
first columns send all parts with each order; the others as `RayFleet.run` does, once for all orders. `--orders` orders
are sent to four actors on this machine, which count the parts that they got; a figure of a group is that of an order
times the ranks, with the first order's besides. CPU seconds are of the supervisor's process with Ray's threads. The
last column is of its own thread, which sends one order after the other while Ray's threads do the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tools"))

import ray
from measurements.machine import describe
from ray import cloudpickle
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.workers.ray_fleet import RayFleet
from shoal_workers.contract import Assignment, SnapshotServer, SnapshotSource
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import fully_sharded

_ACTORS = 4


class _Receiver:
    def run(self, assignment: Assignment, life: int, source: SnapshotSource | None = None) -> int:
        known = source or assignment.restore_snapshot
        return len(known.parts) if known is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,1024,4096")
    parser.add_argument("--orders", type=int, default=256)
    arguments = parser.parse_args()
    print(json.dumps(describe()))
    print("| ranks | with each order: MB | CPU s | once: MB | CPU s | CPU ms of an order | of the thread |")
    print("|---|---|---|---|---|---|---|")
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    for ranks in (int(text) for text in arguments.ranks.split(",")):
        asyncio.run(_compare(ranks, min(ranks, arguments.orders)))
    ray.shutdown()


async def _compare(ranks: int, num_orders: int) -> None:
    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
    config = SupervisorConfig(
        job_id="orders", attempt=1, spec=spec, checkpoint_root="/nowhere", granted=1, epoch=1, spec_version=1
    )
    fleet = RayFleet(config)
    receiver = ray.remote(num_cpus=0)(_Receiver)
    fleet._handles = {index: receiver.remote() for index in range(_ACTORS)}
    few = [_order(rank, ranks) for rank in range(min(num_orders, max(8, 65536 // ranks)))]
    await asyncio.gather(*(fleet.run(index, few[0]) for index in range(_ACTORS)))  # the actors are there
    whole_s, _ = await _send(few, lambda index, order: fleet._ask("run", index, order))
    source = few[0].restore_snapshot
    shared = [order.model_copy(update={"restore_snapshot": source}) for order in (few * num_orders)[:num_orders]]
    began = time.process_time()
    await fleet.run(0, shared[0])
    first_s = time.process_time() - began
    once_s, thread_s = await _send(shared, fleet.run)
    small = shared[0].model_copy(update={"restore_snapshot": None})
    whole_bytes, small_bytes, source_bytes = (len(cloudpickle.dumps(sent)) for sent in (few[0], small, source))
    is_shared = ranks > 64
    once_bytes = ranks * small_bytes + source_bytes if is_shared else ranks * whole_bytes
    print(
        f"| {ranks:,} | {ranks * whole_bytes / 1e6:,.1f} | {ranks * whole_s:.2f} | {once_bytes / 1e6:,.1f} | "
        f"{first_s + ranks * once_s:.2f} | {1e3 * once_s:.3f} | {1e3 * thread_s:.3f} |",
        flush=True,
    )


async def _send(orders: list[Assignment], send: Callable[[int, Assignment], Awaitable[Any]]) -> tuple[float, float]:
    """CPU seconds of an order: of the process, and of this thread."""
    began, thread_began = time.process_time(), time.thread_time()
    answers = await asyncio.gather(*(send(number % _ACTORS, order) for number, order in enumerate(orders)))
    cpu_s, thread_s = time.process_time() - began, time.thread_time() - thread_began
    assert set(answers) == {orders[0].world_size}
    return cpu_s / len(orders), thread_s / len(orders)


def _order(rank: int, ranks: int) -> Assignment:
    servers = (
        SnapshotServer(node_id=f"{part // 8:056x}", host=f"10.{part >> 11}.{part >> 3 & 255}.1", port=40000 + part % 8)
        for part in range(ranks)
    )
    return Assignment(
        job_id="orders",
        attempt=1,
        generation=2,
        rank=rank,
        layout=fully_sharded(ranks),
        store_host="10.0.0.1",
        store_port=40000,
        restore_from=None,
        restore_snapshot=SnapshotSource(generation=1, world_size=ranks, step=100, parts=tuple(servers)),
    )


if __name__ == "__main__":
    main()
