"""`shoal join` on real Ray clusters: a name that another one has, and a service with a certificate of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.certificates import make_certificates
from kit.processes.joined_clusters import Join
from kit.processes.server import Server, until
from kit.worlds.tiny_jobs import submit_tiny
from shoal_api.client import Client
from shoal_service.access_views import ClusterTokenRequest


@pytest.fixture
def join(fleet: Any, tmp_path: Path) -> Iterator[Callable[..., Join]]:
    """`join(fleet.west, url, "--name", "x", token=...)`: one more gateway of that Ray cluster."""
    made: list[Join] = []

    def _join(cluster: Any, *options: str, token: str) -> Join:
        environment = {**cluster.ray.access, "SHOAL_TOKEN": token}
        all_options = [*options, "--ray-address", cluster.ray.address]
        made.append(Join(fleet.python, tmp_path / f"join-{len(made)}", all_options, environment))
        return made[-1].start()

    yield _join
    for one in made:
        one.end()


@pytest.mark.matrix
def test_the_gateway_of_another_ray_cluster_under_a_name_that_is_taken_ends_in_words(
    fleet: Any, join: Callable[..., Join]
) -> None:
    with fleet.server.client as client:
        token = client.create_cluster_token("east", ClusterTokenRequest()).token
        joining = join(fleet.west, f"http://127.0.0.1:{fleet.server.port}", "--name", "east", token=token)
        assert joining.wait() == 1
        said = joining.output()
        assert "The name 'east' is that of another Ray cluster" in said and "--name" in said and "--replace" in said
        nodes = {node.cluster: node.node_id for node in client.cluster().nodes if node.alive and node.cpus}
    assert set(nodes) == {"east", "west"} and nodes["east"] != nodes["west"]


@pytest.mark.matrix
def test_gateway_and_supervisors_of_a_service_with_a_private_authority(
    fleet: Any, join: Callable[..., Join], tmp_path: Path
) -> None:
    authority, certificate, key = make_certificates(tmp_path / "tls")
    options = ["--cluster=secure", f"--tls-cert={certificate}", f"--tls-key={key}"]
    environment = {"SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")}
    server = Server(fleet.python, tmp_path / "secure", options, environment)
    (tmp_path / "gate").mkdir()
    try:
        url = f"https://127.0.0.1:{server.start().port}"
        with Client(url, token=server.token, ca_file=authority) as client:
            token = client.create_cluster_token("secure", ClusterTokenRequest()).token
            join(fleet.east, url, "--name", "secure", "--ca-file", str(authority), token=token)
            until(lambda: client.cluster().connected, "it has joined")
            run = submit_tiny(client, tmp_path / "gate", dict, workers=1, steps=4)
            run.finish()
            assert list(run.losses()) == [1, 2, 3, 4], "the supervisor has reported them"
        assert server.stop() == 0
    finally:
        server.sweep()
