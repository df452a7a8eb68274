"""Several clusters that join a real service over HTTP: real gateways, with a fake in place of each Ray cluster."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from doubles.blocking_cluster import BlockingCluster
from doubles.fake_ray import FakeRay
from doubles.running_gateway import NODE, RunningGateway, until
from shoal_service.access_views import ClusterTokenRequest
from shoal_service.clock import SystemClock
from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.control.joined_clusters import JoinedClusters
from shoal_service.store import Lease, Store, cluster_links, histories, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

Make = Callable[..., RunningGateway]


@pytest.fixture
def clusters(store: Store, lease: Lease) -> Iterator[JoinedClusters]:
    """What the control plane with the lease sees; its own cluster is east."""
    made = JoinedClusters(store, "east", SystemClock(), lambda: lease)
    yield made
    made.close()


def join(make_gateway: Make, store: Store, name: str, ray: FakeRay | None = None) -> RunningGateway:
    token = store.writing(cluster_links.create_token)(name, ClusterTokenRequest(), by="test", now=time.time()).token
    node = NODE.model_copy(update={"node_id": f"node-of-{name}"})
    return make_gateway(cluster=name, token=token, ray=ray or FakeRay(node))


def connected(clusters: JoinedClusters, *names: str) -> None:
    def are() -> bool:
        clusters.refresh()
        return {name for name, one in clusters.joined.items() if one.cluster.connected} == {*names}

    until(are, f"{names} are connected")


def test_clusters_appear_when_they_join_and_each_gets_its_own_orders(
    store: Store, clusters: JoinedClusters, make_gateway: Make
) -> None:
    assert [*clusters.joined] == ["east"] and not clusters.of("").connected
    changed: list[str] = []
    clusters.watch(changed.append)
    west = join(make_gateway, store, "west")
    connected(clusters, "west")
    east = join(make_gateway, store, "east")
    connected(clusters, "east", "west")
    assert [*clusters.joined] == ["east", "west"], "the own one first"
    assert clusters.of("west").snapshot().nodes[0].node_id == "node-of-west"
    assert BlockingCluster(clusters.of("")).reap("of-east", 1) == 0
    assert BlockingCluster(clusters.of("west")).reap("of-west", 1) == 0
    assert (east.ray.reaped, west.ray.reaped) == ([("of-east", 1)], [("of-west", 1)])
    changed.clear()
    west.ray.change_nodes()
    until(lambda: changed == ["west"], "it is said in which cluster a node has changed")


def test_one_that_was_removed_answers_no_call_and_its_thread_ends(
    store: Store, clusters: JoinedClusters, make_gateway: Make
) -> None:
    west = join(make_gateway, store, "west")
    connected(clusters, "west")
    held = clusters.of("west")
    west.stop()
    store.writing(cluster_links.remove)("west", now=time.time() + 60.0)
    clusters.refresh()
    assert [*clusters.joined] == ["east"]
    assert not any(one.name == "cluster west" for one in threading.enumerate())
    for gone in (held, clusters.of("west"), clusters.of("nowhere")):
        with pytest.raises(ClusterUnreachable):
            BlockingCluster(gone).reap("j", 1)
    join(make_gateway, store, "west")
    connected(clusters, "west")
    assert BlockingCluster(clusters.of("west")).reap("j", 1) == 0, "it may join again"


def test_labels_and_cordons_come_with_the_cluster(store: Store, clusters: JoinedClusters) -> None:
    store.writing(cluster_links.create_token)("west", ClusterTokenRequest(), by="test", now=1.0)
    store.writing(cluster_links.label)("west", {"region": "eu"})
    store.writing(cluster_links.cordon)("west", reason="upgrade", now=2.0)
    clusters.refresh()
    west = clusters.joined["west"]
    assert west.labels == {"region": "eu"} and west.cordon is not None and west.cordon.reason == "upgrade"
    assert (west.cluster.connected, west.cluster.silent_s) == (False, None)


@contextmanager
def control(store: Store, clusters: JoinedClusters, owner: str, folder: Path) -> Iterator[ControlLoop]:
    """A control loop on a thread of its own."""
    config = ControlConfig(owner=owner, lease_ttl_s=600.0, checkpoint_url=str(folder))
    loop = ControlLoop(store, clusters, SystemClock(), config)
    stops: list[Callable[[], Any]] = []

    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.get_running_loop()
        stops.append(lambda: running.call_soon_threadsafe(stop.set))
        await loop.run(stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        until(lambda: stops, "the loop runs")
        yield loop
    finally:
        stops[0]()
        thread.join(60)
    assert not thread.is_alive()


def submit(store: Store, cluster: str, wait_s: float) -> str:
    document = {
        "data": {"corpus": "python-stdlib"},
        "stop": {"steps": 4},
        "worker": {"cluster": cluster},
        "elasticity": {"min_workers": 1, "max_workers": 1, "wait_s": wait_s},
    }
    return store.writing(submissions.create)(parse_spec(document), idempotency_key=None, now=time.time())[0].id


def test_jobs_run_in_two_clusters_and_the_one_of_a_lost_cluster_goes_on_in_the_other(
    store: Store, lease: Lease, clusters: JoinedClusters, make_gateway: Make, tmp_path: Path
) -> None:
    east, west = join(make_gateway, store, "east"), join(make_gateway, store, "west")
    connected(clusters, "east", "west")
    here, there = submit(store, "east", 600.0), submit(store, "west", 1.0)
    with control(store, clusters, lease.owner, tmp_path) as loop:
        until(lambda: east.ray.started == [(here, 1)], "the one of east has its supervisor there")
        until(lambda: west.ray.started == [(there, 1)], "and that of west")
        store.writing(submissions.move)(there, "any", now=time.time())
        west.stop()
        until(lambda: east.ray.started == [(here, 1), (there, 2)], "it goes on in the other one")
        events = [
            event for event in store.reading(histories.read_events)(there) if event.data.get("reason") == "cluster_lost"
        ]
        assert "the cluster 'west' and the job's supervisor have been silent" in events[0].data["message"]
        assert store.get_job(there).status.cluster == "east" and store.get_job(here).status.attempt == 1
        assert not loop.snapshot().clusters[1].connected
        join(make_gateway, store, "west", west.ray)
        until(lambda: (there, 1) in west.ray.reaped, "what is left there is ended when it returns")
        assert (there, 2) not in east.ray.reaped and (here, 1) not in east.ray.reaped


@pytest.mark.slow
def test_another_control_plane_finds_each_job_in_its_cluster(
    store: Store, lease: Lease, clusters: JoinedClusters, make_gateway: Make, tmp_path: Path
) -> None:
    west = join(make_gateway, store, "west")
    connected(clusters, "west")
    job_id = submit(store, "west", 600.0)
    with control(store, clusters, lease.owner, tmp_path):
        until(lambda: west.ray.started == [(job_id, 1)], "its supervisor is there")
    mine: list[ControlLoop] = []
    others = JoinedClusters(store, "default", SystemClock(), lambda: mine[0].lease if mine else None)
    try:
        with control(store, others, "another", tmp_path) as loop:
            mine.append(loop)
            until(lambda: loop.snapshot().connected and loop.snapshot().owner == "another", "it has taken over")
            second = submit(store, "west", 600.0)
            west.ray.change_nodes(NODE.model_copy(update={"cpus": 8.0}))
            until(lambda: (second, 1) in west.ray.started, "it starts jobs there")
            assert west.ray.started.count((job_id, 1)) == 1 and (job_id, 1) not in west.ray.reaped
            assert store.get_job(job_id).status.state is JobState.STARTING
    finally:
        others.close()
