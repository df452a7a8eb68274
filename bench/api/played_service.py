"""`shoal serve` with control loop, drivers, REST edge and metrics over a played cluster: nothing runs in it.

    python bench/api/played_service.py DATABASE_URL STATE_DIR [--joined]

It prints its port, and a line of JSON for each supervisor that it starts: job, attempt and token. Who reads them plays
the supervisors over HTTP. The service does the work that real jobs cause, and Ray uses none of the processor. With
`--joined` it has no cluster: gateways join it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

# A process of its own, so that its CPU is counted alone. The packages are those of PYTHONPATH, if it names some.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests"))

from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from shoal_api.http.access.limits import Limits
from shoal_api.http.app import create_app
from shoal_api.http.serving import ConnectionLimits, HttpConfig, make_server
from shoal_service.clock import SystemClock
from shoal_service.collector import OF_CONTROL_PLANE, collect_rarely
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.control.joined_clusters import JoinedClusters
from shoal_service.control.planning import planning_profile
from shoal_service.core.nodes import Node
from shoal_service.store import Store
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.telemetry.exposition import Exposition, Sources
from shoal_service.telemetry.tallies import PassTimes, RequestMetrics

NUM_NODES, CPUS_OF_NODE = 64, 64.0
"""They give room for 1,000 jobs of four workers."""
_PRINTING = threading.Lock()
_WIDE = 1 << 20
"""Wide limits: they are those of one principal or address, and here all requests are of one."""


class PlayedCluster(FakeCluster):
    """A cluster in which nothing runs. The reader of this process's output plays its supervisors."""

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        super().start_supervisor(config, avoid_nodes=avoid_nodes, places=places)
        assert config.home is not None
        line = json.dumps({"job": config.job_id, "attempt": config.attempt, "token": config.home.token})
        with _PRINTING:
            print(line, flush=True)


def main() -> None:
    url, state_dir, is_joined = sys.argv[1], Path(sys.argv[2]), "--joined" in sys.argv
    nodes = tuple(
        Node(node_id=f"n{number}", ip="10.0.0.1", alive=True, cpus=CPUS_OF_NODE, gpus=0.0, memory_gib=256.0)
        for number in range(NUM_NODES)
    )
    store, cluster = Store.open(url), PlayedCluster(nodes)
    config = ControlConfig(owner="bench", lease_ttl_s=9.0, checkpoint_url=str(state_dir / "checkpoints"))
    requests, passes = RequestMetrics(), PassTimes()
    joined = JoinedClusters(store, "default", SystemClock(), lambda: control.lease) if is_joined else None
    control = ControlLoop(store, joined or FakeClusters.single(cluster), SystemClock(), config, times=passes)
    sources = Sources(
        store=store,
        owner=config.owner,
        requests=requests,
        passes=passes,
        cluster=control.snapshot,
        profile_of=lambda spec: planning_profile(spec, ()),
        state_dir=state_dir,
    )
    app = create_app(
        store=store,
        cluster=control,
        scrape=Exposition(sources).render,
        version="bench",
        requests=requests,
        limits=Limits(streams=_WIDE, requests_per_s=_WIDE, requests_at_once=_WIDE),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    http_config = HttpConfig(connections=ConnectionLimits(per_address=_WIDE, total=_WIDE))
    server = make_server(app, host="127.0.0.1", port=port, http=http_config)
    print(port, flush=True)
    collect_rarely(OF_CONTROL_PLANE)  # as `shoal serve` does

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_when_input_ends, args=(lambda: loop.call_soon_threadsafe(stop.set),)).start()
        acting = asyncio.create_task(control.run(stop))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await stop.wait()
        server.should_exit = True
        await asyncio.gather(acting, serving)

    asyncio.run(serve())
    if joined is not None:
        joined.close()


def _when_input_ends(then) -> None:  # type: ignore[no-untyped-def]
    sys.stdin.read()
    then()


if __name__ == "__main__":
    main()
