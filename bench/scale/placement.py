"""On how many nodes the workers of a job start, with the node that Shoal prefers for each and with Ray's own policy.

    python bench/scale/placement.py [--nodes 4] [--cpus 4] [--rounds 3]

Real actors that a `RayFleet` starts on a cluster of empty nodes, and on one where the preferred node turns out to be
full. For each case: workers on each node, the number of pairs that a node has room for (tp 2), and seconds until every
worker has answered. The two ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_all
from measurements.machine import describe
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

_PATIENCE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=4, help="of each node (4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.address:
        asyncio.run(_measure(arguments))
        return
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="shoal-placement-", ignore_cleanup_errors=True) as folder:
        num_cpus = arguments.nodes * arguments.cpus
        cluster = EmbeddedCluster(Path(folder), num_cpus=num_cpus, num_nodes=arguments.nodes)
        try:
            address = cluster.start()
            # A process of its own, because Ray reads the cluster's environment when it is imported.
            command = [sys.executable, __file__, *sys.argv[1:], f"--address={address}"]
            subprocess.run(command, env={**os.environ, **cluster.environment}, check=True)
        finally:
            cluster.stop()
            end_all()


async def _measure(arguments: argparse.Namespace) -> None:
    import ray
    from shoal_service.cluster import gcs
    from shoal_workers.contract.ids import NAMESPACE

    ray.init(arguments.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    names = {node.node_id: node.ip.rpartition(".")[2] for node in gcs.nodes() if node.resources.get("CPU")}
    await _started(names, 2 * arguments.nodes, is_preferred=False, full="")  # the fork servers of the nodes start
    print(f"{'workers':>7}  {'placed by':10} {'nodes':>5} {'pairs':>5} {'seconds':>8}   workers on each node")
    rows = []
    for number in (2, arguments.cpus, arguments.cpus + 2, 2 * arguments.cpus):
        for full in ("", next(iter(names))):
            for is_preferred in (True, False) if not full else (True,):
                rounds = [
                    await _started(names, number, is_preferred=is_preferred, full=full) for _ in range(arguments.rounds)
                ]
                by = ("full node" if full else "Shoal") if is_preferred else "Ray"
                nodes, pairs = (max(r[key] for r in rounds) for key in ("nodes", "pairs"))
                seconds = statistics.median(r["seconds"] for r in rounds)
                where = " | ".join(str(r["where"]) for r in rounds)
                print(f"{number:7}  {by:10} {nodes:5} {pairs:5} {seconds:8.2f}   {where}", flush=True)
                rows.append({"workers": number, "by": by, "rounds": rounds})
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], "rows": rows}))
    ray.shutdown()


async def _started(names: dict[str, str], number: int, *, is_preferred: bool, full: str) -> dict[str, Any]:
    """The nodes of `number` workers of a new job, and the seconds until they had started. `full`: the id of a node that
    is filled after Shoal has read its free CPUs, so Shoal still prefers it."""
    import ray
    from shoal_service.cluster.gcs import available
    from shoal_service.core.attempt.messages import StartWorker
    from shoal_service.supervisor.config import SupervisorConfig
    from shoal_service.supervisor.workers.ray_fleet import FreeNode, NodePreference, RayFleet
    from shoal_workers.contract.checks.spec_errors import parse_spec
    from shoal_workers.contract.ids import worker_name
    from shoal_workers.contract.placing import Placement

    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
    job_id = uuid.uuid4().hex
    config = SupervisorConfig(
        job_id=job_id, attempt=1, spec=spec, checkpoint_root="/nowhere", granted=number, epoch=1, spec_version=1
    )
    fleet = RayFleet(config)
    occupant = None
    if not is_preferred:
        fleet._preference = NodePreference({}, Placement.PACK)
    if full:
        amount = available()[full]["CPU"]
        stale = [FreeNode(full, {}, {"CPU": float(number)})]
        fleet._preference = NodePreference({"CPU": 1.0}, Placement.PACK, read=lambda: stale)
        occupant = ray.remote(_Occupant).options(num_cpus=amount, label_selector={"ray.io/node-id": full}).remote()
        ray.get(occupant.__ray_ready__.remote(), timeout=_PATIENCE_S)

    async def start(index: int) -> str:
        order = StartWorker(index, worker_name(job_id, 1, index), num_missing=number - index, tp=2)
        await fleet.start(order)
        info = await fleet.prepare(index)
        return str(getattr(info, "node_id", info))

    began = time.perf_counter()
    placed = Counter(await asyncio.gather(*(start(index) for index in range(number))))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(fleet.kill(index) for index in range(number)))
    if occupant is not None:
        ray.kill(occupant)
    await asyncio.sleep(1.0)  # until the nodes have reported what is free
    where = {names[node]: count for node, count in sorted(placed.items())}
    pairs = sum(count // 2 for count in placed.values())
    return {"nodes": len(placed), "pairs": pairs, "seconds": seconds, "where": where}


class _Occupant:
    """Reserves the CPUs of a node."""


if __name__ == "__main__":
    main()
