"""Uploads of code over a slow link to one cluster: what the lease, a pause in another cluster and the link itself see.

    python bench/api/slow_link.py [--uploads 40] [--rate 4000000]

A real service, its control loop and two real gateways, with a fake in place of each Ray cluster. All that `east` and
the service say to each other passes a proxy of `--rate` bytes a second. Forty jobs start in `east`, each with code of 5
to 16 MiB of its own; jobs train in `west`, whose supervisors are played, and one after the other is paused. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from api.supervisors import Connection, Service, Supervisor, played_service, stop_tasks
from doubles.fake_ray import FakeRay
from doubles.running_gateway import RunningGateway, until
from kit.processes.proxy import Proxy
from measurements.machine import describe
from shoal_service.access_views import ClusterTokenRequest
from shoal_service.core.nodes import Node
from shoal_service.store import Store, archives, cluster_links, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec

_LEAST_BYTES, _MOST_BYTES = 5 << 20, 16 << 20
_PAUSES = 10
_LONGEST_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4e6, help="bytes per second, in each direction")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-slow-link-") as folder:
        figures = asyncio.run(measure(Path(folder), arguments.uploads, arguments.rate))
    print(json.dumps({"machine": describe(), "uploads": arguments.uploads, "rate": arguments.rate, **figures}))


async def measure(folder: Path, uploads: int, rate: float) -> dict[str, Any]:
    with (
        played_service(folder, None, "--joined") as (store, _, service),
        contextlib.closing(Proxy(service.port)) as link,
    ):
        link.shape(rate)
        east = _gateway(store, "east", link.port)
        west = _gateway(store, "west", service.port)
        try:
            async with _training(store, service, west.ray, 2 * _PAUSES):
                alone_s = [await _pause(service, job) for job in service.supervisors[:_PAUSES]]
                num_bytes = await asyncio.to_thread(_submit_with_code, store, uploads)
                watch, begun_mono = _Watch(store, service), time.monotonic()
                watching = asyncio.create_task(watch.look())
                pauses_s: list[float] = []
                every_s = num_bytes / rate / (_PAUSES + 1)
                while len(east.ray.code) < uploads:
                    assert time.monotonic() - begun_mono < _LONGEST_S, "the uploads do not end"
                    await asyncio.sleep(0.2)
                    if len(pauses_s) < min(_PAUSES, (time.monotonic() - begun_mono) // every_s):
                        pauses_s.append(await _pause(service, service.supervisors[_PAUSES + len(pauses_s)]))
                took_s = time.monotonic() - begun_mono
                await stop_tasks([watching])
        finally:
            east.stop()
            west.stop()
    return {
        "megabytes": round(num_bytes / 1e6),
        "uploads_s": round(took_s, 1),
        "at_the_rate_s": round(num_bytes / rate, 1),
        "lease_least_left_s": round(watch.lease_left_s, 2),
        "cluster_away_s": round(watch.away_s, 2),
        "pause_alone_max_s": round(max(alone_s), 2),
        "pauses": len(pauses_s),
        "pause_max_s": round(max(pauses_s), 2),
    }


def _gateway(store: Store, cluster: str, port: int) -> RunningGateway:
    token = store.writing(cluster_links.create_token)(cluster, ClusterTokenRequest(), by="bench", now=time.time()).token
    node = Node(node_id=f"of-{cluster}", ip="10.0.0.1", alive=True, cpus=256.0, gpus=0.0, memory_gib=1024.0)
    return RunningGateway(f"http://127.0.0.1:{port}", token, cluster, ray=FakeRay(node)).start()


def _spec(cluster: str, **changes: Any) -> Any:
    elasticity = {"min_workers": 2, "max_workers": 2}
    document = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 10_000_000}, "elasticity": elasticity}
    return parse_spec({**document, "worker": {"cluster": cluster}, **changes})


@contextlib.asynccontextmanager
async def _training(store: Store, service: Service, ray: FakeRay, jobs: int) -> AsyncIterator[None]:
    for _ in range(jobs):
        store.writing(submissions.create)(_spec("west"), idempotency_key=None, now=time.time())
    await asyncio.to_thread(until, lambda: len(ray.started) == jobs, "the jobs start")
    for number, (job_id, attempt) in enumerate(ray.started):
        home = ray.supervisors[job_id, attempt].config.home
        assert home is not None
        service.supervisors.append(Supervisor(service.port, job_id, attempt, home.token, number / jobs))
    tasks = [asyncio.create_task(job.report_forever(1)) for job in service.supervisors]
    tasks += [asyncio.create_task(job.poll_forever()) for job in service.supervisors]
    try:
        await asyncio.gather(*(job.polled.wait() for job in service.supervisors))
        yield
    finally:
        await stop_tasks(tasks)


def _submit_with_code(store: Store, uploads: int) -> int:
    """Submits the jobs of the slow cluster, and returns the bytes of their code."""
    draw, num_bytes = Random(47), 0
    for _ in range(uploads):
        data = draw.randbytes(draw.randint(_LEAST_BYTES, _MOST_BYTES))
        archive = archives.Archive(sha256(data).hexdigest(), data)
        num_bytes += len(data)
        store.writing(archives.put)(archive, now=time.time())
        spec = _spec("east", code={"archive": archive.sha256})
        store.writing(submissions.create)(spec, idempotency_key=None, now=time.time())
    return num_bytes


async def _pause(service: Service, job: Supervisor) -> float:
    """Seconds from the request to its arrival at the supervisor."""
    job.directed.clear()
    begun_mono = time.monotonic()
    await Connection(service.port, service.admin).ask("POST", f"/v1/jobs/{job.job_id}/pause")
    await asyncio.wait_for(job.directed.wait(), _LONGEST_S)
    return time.monotonic() - begun_mono


class _Watch:
    """Looks at the lease and at the link of the slow cluster."""

    def __init__(self, store: Store, service: Service) -> None:
        self._store = store
        self._admin = Connection(service.port, service.admin)
        self.lease_left_s = float("inf")
        self.away_s = 0.0

    async def look(self) -> None:
        looked_mono = time.monotonic()
        while True:
            lease = await asyncio.to_thread(self._store.read_lease)
            self.lease_left_s = min(self.lease_left_s, lease.expires_at - time.time() if lease is not None else 0.0)
            clusters = json.loads(await self._admin.ask("GET", "/v1/clusters"))
            now_mono = time.monotonic()
            if not all(cluster["connected"] for cluster in clusters["items"] if cluster["name"] == "east"):
                self.away_s += now_mono - looked_mono
            looked_mono = now_mono
            await asyncio.sleep(0.25)


if __name__ == "__main__":
    main()
