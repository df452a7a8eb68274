"""Seconds until a control loop that takes over many attempts follows all of them.

    python bench/scale/takeover.py [--attempts 2000]

The shipped control loop on a real SQLite store, and a cluster that only answers (tests/doubles): seconds until every
driver has its link and has looked for its supervisor, and until every one has its directive. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import func, select

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("tests", "tools"))

from doubles.control_bench import SPEC, node
from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from measurements.machine import describe
from shoal_service.clock import SystemClock
from shoal_service.clusters.wire import ClusterSnapshot, FoundSupervisor
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.store import Store, driving, submissions, supervisor_links
from shoal_service.store.database import Transaction, directives
from shoal_workers.contract.checks.spec_errors import parse_spec

_LONGEST_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=2_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-takeover-") as folder:
        figures = asyncio.run(take_over(Path(folder), arguments.attempts))
    print(json.dumps({"machine": describe(), "attempts": arguments.attempts, **figures}))


class _Cluster(FakeCluster):
    """It has every supervisor, and counts those that were looked for."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__(nodes)
        self.asked: set[tuple[str, int]] = set()

    def snapshot(self) -> ClusterSnapshot:
        free = {node.node_id: WorkerNeed() for node in self.nodes}
        return ClusterSnapshot(nodes=self.nodes, free=free, reservations=(), attempts=frozenset(self.asked))

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor:
        self.asked.add((job_id, attempt))
        return FoundSupervisor(dials_here=True)


async def take_over(folder: Path, attempts: int) -> dict[str, float]:
    store = Store.open(f"sqlite:///{folder}/shoal.db")
    first = store.acquire_lease("first", ttl_s=1e6, now=time.time())
    assert first is not None
    spec = parse_spec({**SPEC, "elasticity": {"min_workers": 1, "max_workers": 1}})
    for number in range(attempts):
        with store.write(first.epoch) as tx:
            job = submissions.create(tx, spec, idempotency_key=f"takeover-{number}", now=time.time())[0]
            driving.begin_attempt(tx, job.id, workers=1, now=time.time())
            supervisor_links.keep_token(tx, job.id, 1, job.id)
    store.release_lease("first")
    cluster = _Cluster(tuple(node(f"n{number}", cpus=8.0) for number in range(-(-attempts // 8))))
    config = ControlConfig(owner="second", lease_ttl_s=60.0, checkpoint_url=str(folder))
    loop, stop = ControlLoop(store, FakeClusters.single(cluster), SystemClock(), config), asyncio.Event()
    began_mono, began_cpu_s = time.monotonic(), time.process_time()
    task = asyncio.create_task(loop.run(stop))
    figures = {}
    for name, is_done in (
        ("linked", lambda: len(cluster.asked) == attempts),
        ("directed", lambda: store.reading(_count_directives)() == attempts),
    ):
        while not is_done():
            assert not task.done() and time.monotonic() - began_mono < _LONGEST_S
            await asyncio.sleep(0.05)
        figures[f"{name}_s"] = round(time.monotonic() - began_mono, 2)
        figures[f"{name}_cpu_s"] = round(time.process_time() - began_cpu_s, 2)
    stop.set()
    await task
    store.close()
    return figures


def _count_directives(tx: Transaction) -> int:
    return int(tx.execute(select(func.count()).select_from(directives)).scalar_one())


if __name__ == "__main__":
    main()
