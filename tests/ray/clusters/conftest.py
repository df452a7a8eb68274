"""Two Ray clusters on this machine, east and west, that have joined one service with `shoal join` processes.

    service  <- link -  gateway of east        service  <- home -  supervisors of east
             <- link -  gateway of west                 <- home -  supervisors of west

Each arrow is a proxy that a test may hold. One pair for the session; `fleet` mends what the test before has broken.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.processes.joined_clusters import Join, RayCluster
from kit.processes.proxy import Proxy
from kit.processes.server import PATIENCE_S, Server, until
from kit.worlds.tiny_jobs import Run, submit_tiny
from shoal_api.client import Client
from shoal_service.access_views import ClusterTokenRequest

CPUS = 4
"""CPUs of each cluster."""
_LEASE_TTL_S = 3


@dataclass
class JoinedCluster:
    """One of the two."""

    name: str
    ray: RayCluster
    link: Proxy
    """Between its gateway and the service."""
    home: Proxy
    """Between its supervisors and the service."""
    join: Join
    token: str

    def start(self) -> None:
        """What does not run. A gateway of a cluster that was made anew is started with it."""
        if not self.ray.is_alive:
            self.join.end()
            self.ray.start()
        if not self.join.is_alive:
            options = [self.link.url, "--name", self.name, "--ray-address", self.ray.address]
            self.join.options = options
            self.join.environment = {
                **self.ray.access,
                "SHOAL_TOKEN": self.token,
                "SHOAL_HOME_URL": self.home.url,
            }
            self.join.start()

    def lose(self) -> None:
        """Its gateway, its head, its raylet, and all that runs there."""
        self.join.end()
        self.ray.lose()

    def end(self) -> None:
        self.join.end()
        self.ray.end()
        for proxy in (self.link, self.home):
            proxy.close()


@dataclass
class Fleet:
    """The service and both clusters."""

    directory: Path
    python: Path
    server: Server
    east: JoinedCluster
    west: JoinedCluster
    servers: list[Server] = field(default_factory=list)
    """All that were started."""

    @property
    def clusters(self) -> tuple[JoinedCluster, JoinedCluster]:
        return self.east, self.west

    def make_server(self) -> Server:
        """Another control plane on the same database. Not started."""
        directory = self.directory / f"server-{len(self.servers)}"
        options = [f"--database-url=sqlite:///{self.directory}/shoal.db", "--cluster=east"]
        environment = {
            "SHOAL_LEASE_TTL_S": str(_LEASE_TTL_S),
            "SHOAL_CHECKPOINT_URL": str(self.directory / "checkpoints"),
        }
        self.servers.append(Server(self.python, directory, options, environment))
        return self.servers[-1]

    def lead_to(self, server: Server) -> None:
        """All links lead to this control plane from now on."""
        self.server = server
        for cluster in self.clusters:
            for proxy in (cluster.link, cluster.home):
                proxy.redirect(server.port)

    def mend(self) -> None:
        """Everything runs, and the service sees both clusters."""
        for cluster in self.clusters:
            cluster.link.release()
            cluster.home.release()
            cluster.start()
        self.wait_for("east", "west")

    def wait_for(self, *names: str) -> None:
        """Until exactly these clusters answer the service."""
        with self.server.client as client:
            until(lambda: self.seen(client) == set(names), f"the service sees the clusters {', '.join(names)}")

    @staticmethod
    def seen(client: Client) -> set[str]:
        """Names of the clusters that answer and have a node, as the service says."""
        return {one.name for one in client.cluster().clusters if one.connected and one.cpus_total}

    def attempts(self) -> list[tuple[str, str]]:
        """Supervisors that live: cluster, and title of the process."""
        return [(one.name, f"{pid}") for one in self.clusters for pid in one.ray.actors("SupervisorActor")]

    def end(self) -> None:
        for server in self.servers:
            server.end()
        for cluster in self.clusters:
            cluster.end()


@pytest.fixture(scope="package")
def whole_fleet(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    clusters = []
    for name in ("east", "west"):
        ray, join = (kind(wheel_python, directory / name, *more) for kind, more in ((RayCluster, (CPUS,)), (Join, ())))
        clusters.append(JoinedCluster(name, ray, Proxy(0), Proxy(0), join, token=""))
    fleet = Fleet(directory, wheel_python, None, *clusters)  # type: ignore[arg-type]
    try:
        fleet.lead_to(fleet.make_server().start())
        with fleet.server.client as client:
            for cluster in clusters:
                cluster.token = client.create_cluster_token(cluster.name, ClusterTokenRequest()).token
        fleet.mend()
        yield fleet
        for cluster in clusters:
            cluster.join.send(signal.SIGTERM)
            assert cluster.join.wait() == 0, cluster.join.output()
        assert fleet.server.stop() == 0
        assert fleet.attempts() == [], "an orderly stop of the service leaves supervisors of jobs that have ended"
    finally:
        fleet.end()


@pytest.fixture
def fleet(whole_fleet: Fleet) -> Fleet:
    whole_fleet.mend()
    return whole_fleet


@dataclass
class FleetRun(Run):
    """A job of the tiny task on one of the clusters."""

    fleet: Fleet | None = None

    def clusters_of_workers(self) -> set[str]:
        """In which clusters the job's workers are, by their nodes."""
        by_node = {node.node_id: node.cluster for node in self.client.cluster().nodes}
        return {by_node[worker.node_id] for worker in self.client.workers(self.id) if worker.rank is not None}

    def assert_losses_of_the_undisturbed_run(self) -> None:
        losses, reference, steps = self.losses(), self.reference(), self.job.spec.stop.steps
        assert steps is not None and list(losses) == list(range(1, steps + 1))
        assert max(abs(losses[step] - reference[step]) for step in losses) <= 3e-7


@pytest.fixture
def submit(
    fleet: Fleet, tmp_path: Path, undisturbed: Callable[[], dict[int, float]]
) -> Iterator[Callable[..., FleetRun]]:
    """`submit("east", steps=10, strikes=[...])`: a job of two workers that may run in that cluster ("any": in each)."""
    runs: list[FleetRun] = []
    client = fleet.server.client

    def _submit(cluster: str, *, to: Client | None = None, **settings: Any) -> FleetRun:
        gate = tmp_path / f"gate-{len(runs)}"
        gate.mkdir()
        worker = {"cluster": cluster, **settings.pop("worker", {})}
        settings = {"workers": 2, "min_workers": 2, "worker": worker, **settings}
        run = submit_tiny(to or client, gate, undisturbed, **settings)
        runs.append(FleetRun(run.client, run.job, run.gate, run.reference, fleet))
        return runs[-1]

    yield _submit
    with fleet.server.client as newest:
        for run in runs:
            if not newest.job(run.id).status.state.ended:
                newest.cancel(run.id)
                newest.wait(run.id, timeout_s=PATIENCE_S)
    client.close()
