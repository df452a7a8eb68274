"""A job that waits brings a node, through Ray's autoscaler and its fake provider; the end of the job releases it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.server import Server, until
from kit.worlds.autoscaling_cluster import AutoscalingCluster
from kit.worlds.tiny_jobs import submit_tiny
from shoal_workers.contract.job import JobState

_NODE_CPUS = 2


@pytest.fixture
def cluster(wheel_python: Path, tmp_path: Path) -> Iterator[AutoscalingCluster]:
    """Without a node that could train."""
    cluster = AutoscalingCluster(tmp_path, node_cpus=_NODE_CPUS, max_nodes=2, idle_s=2.0, zones=("a", "b"))
    try:
        cluster.start(wheel_python)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def server(wheel_python: Path, tmp_path: Path, cluster: AutoscalingCluster) -> Iterator[Server]:
    environment = {**cluster.environment, "SHOAL_SCALE_OUT": "true"}
    server = Server(wheel_python, tmp_path / "server", [f"--ray-address={cluster.address}"], environment)
    try:
        yield server.start()
        assert server.stop() == 0
    finally:
        server.sweep()


@pytest.mark.matrix
def test_a_waiting_job_brings_a_node_trains_there_and_its_end_releases_the_node(
    server: Server, cluster: AutoscalingCluster, tmp_path: Path
) -> None:
    with server.client as client:

        def cpus() -> float:
            return client.cluster().cpus_total

        until(lambda: client.cluster().connected, "the server has joined the cluster")
        assert cpus() == 0, "nothing is asked for, and no node comes"
        (tmp_path / "gate").mkdir()
        here = {"selector": {"zone": "b"}}
        workers = {"workers": _NODE_CPUS, "min_workers": _NODE_CPUS}
        run = submit_tiny(client, tmp_path / "gate", dict, **workers, worker=here, steps=20)
        waiting = until(lambda: run.now().queue, "the scheduler has considered the job")
        assert waiting.reason.endswith("Add nodes, or lower elasticity.min_workers.")
        try:
            until(cpus, "a node comes")
        except AssertionError:
            raise AssertionError(cluster.autoscaler_log()) from None
        [node] = [node for node in client.nodes() if node.alive and node.cpus]
        assert (node.cpus, node.labels["zone"]) == (_NODE_CPUS, "b"), "one node is enough, of the type that it may use"
        job = run.wait_for(JobState.SUCCEEDED)
        assert (job.status.steps_lost, run.world_sizes()) == (0, [_NODE_CPUS])
        until(lambda: not cpus(), "the request is withdrawn, so the idle node is released")
