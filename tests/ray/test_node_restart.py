"""A raylet of the embedded cluster dies under a job: its node is started again, and the job is back at full size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.ray_nodes import Nodes
from kit.processes.server import Server
from kit.worlds.tiny_jobs import holds, submit_tiny
from shoal_workers.contract.job import JobState

_VICTIM = "127.0.0.3"


@pytest.fixture
def server(wheel_python: Path, tmp_path: Path) -> Iterator[Server]:
    """With a head and two nodes of one CPU each."""
    options = ["--num-cpus=2", "--nodes=2"]
    server = Server(wheel_python, tmp_path / "server", options, {"RAY_worker_niceness": "0", "SHOAL_STOP_S": "0"})
    with server.running():
        yield server
    assert server.processes() == {}


@pytest.mark.matrix
def test_the_node_of_a_killed_raylet_comes_back_and_the_job_with_it(server: Server, tmp_path: Path) -> None:
    with server.client as client:
        run = submit_tiny(client, tmp_path, dict, workers=2, steps=1_000_000, step_s=0.05, strikes=holds(5))
        run.wait_at("step-5-0")
        Nodes(server.state_dir, python=server.python).kill_raylet(_VICTIM)
        run.wait_for_event("incident.opened")
        run.release("step-5-0")
        formed = run.wait_for_event("generation.formed", count=3)
        assert (run.world_sizes(), formed.data["workers"]) == ([2, 1, 2], 2)
        assert sorted(worker.node_ip for worker in client.workers(run.id)) == ["127.0.0.2", _VICTIM]
        client.cancel(run.id)
        run.finish(JobState.CANCELLED)
