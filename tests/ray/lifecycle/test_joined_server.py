"""`shoal serve --ray-address`: a server joins a Ray cluster that is there, trains on it, and leaves it as it was."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.server import Server, until
from kit.worlds.tiny_jobs import submit_tiny
from shoal_api.client import Client


@pytest.mark.matrix
def test_a_server_that_joins_a_cluster_trains_there_and_leaves_it_running(
    join_cluster: Callable[..., Server], shoal_server: Server, client: Client, tmp_path: Path
) -> None:
    before = set(shoal_server.actors("SupervisorActor"))
    server = join_cluster(tmp_path / "joined", [], {"SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")})
    server.start().wait_for_cluster()
    (tmp_path / "gate").mkdir()
    with server.client as joined:
        assert {node.node_id for node in joined.cluster().nodes} == {node.node_id for node in client.cluster().nodes}
        run = submit_tiny(joined, tmp_path / "gate", dict, workers=1, steps=4)
        run.finish()
        assert run.world_sizes() == [1]
    until(lambda: before >= set(shoal_server.actors("SupervisorActor")), "its supervisor is released")
    assert server.stop() == 0
    assert client.cluster().connected and client.cluster().nodes, "an orderly stop ends no cluster of others"


_LEAVE_A_SUPERVISOR = """
import sys, ray
from shoal_workers.contract.ids import NAMESPACE, supervisor_name

class SupervisorActor:
    pass

ray.init(sys.argv[1], namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
options = {"name": supervisor_name(sys.argv[2], 1), "lifetime": "detached", "num_cpus": 0}
ray.get(ray.remote(SupervisorActor).options(**options).remote().__ray_ready__.remote())
"""


@pytest.mark.matrix
def test_a_server_ends_the_supervisor_that_a_killed_one_has_left(
    join_cluster: Callable[..., Server], shoal_server: Server, tmp_path: Path
) -> None:
    """Killed between the store of the job's end and the release: here, the supervisor is put there afterwards."""
    before = set(shoal_server.actors("SupervisorActor"))
    server = join_cluster(tmp_path / "joined", [], {"SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")})
    server.start().wait_for_cluster()
    (tmp_path / "gate").mkdir()
    with server.client as joined:
        run = submit_tiny(joined, tmp_path / "gate", dict, workers=1, steps=4)
        run.finish()
    until(lambda: before >= set(shoal_server.actors("SupervisorActor")), "its supervisor is released")
    assert server.stop() == 0
    note = shoal_server.note
    assert note is not None
    for job_id in (run.id, "job-of-another-server"):
        command = [str(server.python), "-c", _LEAVE_A_SUPERVISOR, note["address"], job_id]
        subprocess.run(command, env={**os.environ, **shoal_server.ray_environment}, check=True, timeout=120)
    left = set(shoal_server.actors("SupervisorActor")) - before
    assert len(left) == 2
    server.start().wait_for_cluster()
    until(lambda: len(left & set(shoal_server.actors("SupervisorActor"))) == 1, "that of its own job is ended")
    assert server.stop() == 0
    for pid in left & set(shoal_server.actors("SupervisorActor")):
        os.kill(pid, signal.SIGKILL)
