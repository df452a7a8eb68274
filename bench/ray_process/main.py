"""What the process with the connection to Ray costs: time of a pull beside a call from one process, and memory.

    python bench/ray_process/main.py [--pulls 1000]

Starts an embedded cluster with one actor that answers as a supervisor does. `direct`: RayCluster in this process, which
unpickles; `through the process`: RemoteCluster, whose answers are JSON that is validated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal_service.cluster.embedded_cluster import EmbeddedCluster
from shoal_service.cluster.ray_environment import inherited
from shoal_service.control.protocols import SupervisorHandle
from shoal_service.control.ray_process.remote_cluster import RemoteCluster
from shoal_service.reports import SupervisorReports
from shoal_service.views import JobStatus, SeriesPoint
from shoal_workers.contract.ids import NAMESPACE, supervisor_name
from shoal_workers.contract.job import JobState
from shoal_workers.contract.log_settings import LogSettings

_SIZES = (1, 20, 500)


class Reporter:
    """In place of a supervisor; `epoch` says how many points a pull has."""

    def pull(self, after: int, wait_s: float, epoch: int) -> SupervisorReports:
        fixed: dict[str, Any] = {"at": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0, "step_s": 1.0}
        points = (SeriesPoint(step=n, loss=1.5, world_size=2, generation=1, **fixed) for n in range(epoch))
        status = JobStatus(state=JobState.RUNNING, attempt=1, step=epoch)
        return SupervisorReports(attempt=1, seq=after + 1, series=tuple(points), status=status)


async def measure(handle: SupervisorHandle, num_points: int, pulls: int) -> str:
    times_ms = []
    cpu_s = time.process_time()
    for _ in range(pulls):
        began = time.perf_counter()
        reports = await handle.pull(0, 0.0, num_points)
        times_ms.append((time.perf_counter() - began) * 1e3)
        assert len(reports.series) == num_points
    cpu_ms = (time.process_time() - cpu_s) / pulls * 1e3
    times_ms.sort()
    return (
        f"{num_points:4} points: median {statistics.median(times_ms):6.2f} ms, "
        f"99 % {times_ms[int(0.99 * pulls)]:6.2f} ms, CPU of this process {cpu_ms:5.2f} ms a pull"
    )


def resident_mib(pid: int) -> str:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return ", ".join(f"{name} {int(fields[name].split()[0]) / 1024:.0f} MiB" for name in ("Rss", "Pss"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulls", type=int, default=1000)
    pulls = parser.parse_args().pulls
    with tempfile.TemporaryDirectory() as folder:
        embedded = EmbeddedCluster(Path(folder), num_cpus=1)
        try:
            address = embedded.start()
            environment = {**inherited(os.environ), **embedded.environment}
            cluster = RemoteCluster(environment, LogSettings())
            began = time.perf_counter()
            cluster.connect(address)
            print(f"start and connection of the process: {time.perf_counter() - began:.2f} s")
            assert cluster.pid is not None
            print(f"this process without Ray: {resident_mib(os.getpid())}")

            os.environ.update(environment)
            import ray
            from shoal_service.control.ray_process.ray_cluster import RayCluster

            direct = RayCluster()
            direct.connect(address)
            actor = ray.remote(Reporter).options(
                name=supervisor_name("bench", 1), namespace=NAMESPACE, lifetime="detached", num_cpus=0
            )
            ray.get(actor.remote().pull.remote(0, 0.0, 1))
            for name, source in (("direct", direct), ("through the process", cluster)) * 2:
                handle = source.find_supervisor("bench", 1)
                assert handle is not None
                print(name)
                for num_points in _SIZES:
                    print("   ", asyncio.run(measure(handle, num_points, pulls)))
            print(f"this process with Ray:    {resident_mib(os.getpid())}")
            print(f"the Ray process:          {resident_mib(cluster.pid)}")
            cluster.disconnect()
            direct.disconnect()
        finally:
            embedded.stop()


if __name__ == "__main__":
    main()
