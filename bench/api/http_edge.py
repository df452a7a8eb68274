"""The HTTP edge and the metrics of `shoal serve` over a database, without a control loop.

    python bench/api/http_edge.py DATABASE_URL        prints its port, and serves until it is ended

A control loop would start a supervisor for each of 1,000 jobs.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

# A process of its own, so that its CPU is counted alone.
sys.path.append(str(Path(__file__).parents[1]))

from shoal_api.http.app import create_app
from shoal_api.http.serving import make_server
from shoal_service.collector import OF_CONTROL_PLANE, collect_rarely
from shoal_service.control.planning import planning_profile
from shoal_service.fleet_views import ClusterView, StartForecast
from shoal_service.store import Store
from shoal_service.telemetry.exposition import Exposition, Sources
from shoal_service.telemetry.tallies import PassTimes, RequestMetrics
from shoal_service.views import JobView
from shoal_workers.contract.messages import Stacks
from shoal_workers.contract.spec import JobSpec


class NoCluster:
    """A `shoal_api.http.context.ClusterSource` of a server that has not reached its cluster yet."""

    async def stacks(self, job_id: str, *, rank: int | None = None, native: bool = False) -> Stacks | None:
        return None

    def expected_start(self, spec: JobSpec) -> StartForecast | None:
        return None

    async def why_not_in(self, job: JobView, cluster: str) -> str:
        return "no cluster has joined"

    def snapshot(self) -> ClusterView:
        empty = {"cpus_total": 0.0, "cpus_free": 0.0, "gpus_total": 0.0, "gpus_free": 0.0}
        return ClusterView(connected=False, address="", nodes=(), owner="bench", epoch=1, **empty)


def main() -> None:
    store = Store.open(sys.argv[1])
    cluster, requests = NoCluster(), RequestMetrics()
    sources = Sources(
        store=store,
        owner="bench",
        requests=requests,
        passes=PassTimes(),
        cluster=cluster.snapshot,
        profile_of=lambda spec: planning_profile(spec, ()),
        state_dir=Path.cwd(),
    )
    app = create_app(
        store=store,
        cluster=cluster,
        scrape=Exposition(sources).render,
        version="bench",
        checkpoint_url="",
        requests=requests,
        warnings=lambda: (),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    print(port, flush=True)
    collect_rarely(OF_CONTROL_PLANE)  # as `shoal serve` does
    make_server(app, host="127.0.0.1", port=port).run(sockets=[listener])


if __name__ == "__main__":
    main()
