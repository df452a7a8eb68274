"""`shoal serve --ray-address`: a server joins a Ray cluster that is there, trains on it, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kit.processes.server import Server, until
from kit.worlds.tiny_jobs import submit_tiny
from shoal_api.client import Client


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


def test_a_server_that_is_stopped_right_after_the_end_of_a_job_leaves_no_supervisor(
    join_cluster: Callable[..., Server], shoal_server: Server, tmp_path: Path
) -> None:
    """Nobody else would end it: the job has ended, so no other control plane drives it."""
    before = set(shoal_server.actors("SupervisorActor"))
    server = join_cluster(tmp_path / "joined", [], {"SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")})
    server.start().wait_for_cluster()
    (tmp_path / "gate").mkdir()
    with server.client as joined:
        submit_tiny(joined, tmp_path / "gate", dict, workers=1, steps=4).finish()
    assert server.stop() == 0
    until(lambda: before >= set(shoal_server.actors("SupervisorActor")), "its supervisor is released")
