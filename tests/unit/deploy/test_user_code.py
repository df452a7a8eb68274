"""What runs code of users shares no container, user or volume with a secret of the service: compose and Kubernetes.

Whatever starts a Ray node runs code of users: a job starts an actor without CPUs on any node of its cluster.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
RAY_TOKEN = {"ray_auth_token", "shoal-ray-token"}
"""The only secret that a node needs."""
KEPT = {"shoal", "state", "postgres"}
"""Volumes with the token of role admin, or the database."""


@dataclass(frozen=True)
class Container:
    name: str
    user: int
    runs_user_code: bool
    secrets: frozenset[str]
    volumes: frozenset[str]
    variables: frozenset[str]


def _of_compose(compose: dict[str, Any]) -> Iterator[Container]:
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", (DEPLOY / "Dockerfile").read_text(), re.M | re.S)
    )
    for name, service in compose["services"].items():
        target = service.get("build", {}).get("target")
        if target is None:
            continue  # PostgreSQL, Prometheus, Grafana: images of others, in a network that no node is in
        [default] = re.findall(r"^USER (\S+)$", stages[target], re.M)
        yield Container(
            name,
            user=int(str(service.get("user", default)).split(":")[0]),
            runs_user_code=target == "worker" and service.get("entrypoint") != ["shoal-gateway"],
            secrets=frozenset(service.get("secrets", ())),
            volumes=frozenset(volume.split(":")[0] for volume in service.get("volumes", ())),
            variables=frozenset(service.get("environment", {})),
        )


def _of_kubernetes(pods: dict[str, dict[str, Any]]) -> Iterator[Container]:
    for name, pod in pods.items():
        volumes = {one["name"]: one for one in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            secrets = {volumes[one]["secret"]["secretName"] for one in mounted if "secret" in volumes[one]}
            yield Container(
                f"{name}/{container['name']}",
                user=container["securityContext"].get("runAsUser", pod["securityContext"]["runAsUser"]),
                runs_user_code="shoal-worker" in container["image"] and container["name"] != "gateway",
                secrets=frozenset(secrets | ({"kubernetes"} if "kubernetes-api" in mounted else set())),
                volumes=frozenset(one for one in mounted if "secret" not in volumes[one]),
                variables=frozenset(one["name"] for one in container.get("env", ())),
            )


@pytest.fixture(params=["compose", "kubernetes"])
def containers(request: pytest.FixtureRequest) -> list[Container]:
    if request.param == "compose":
        return list(_of_compose(request.getfixturevalue("compose")))
    return list(_of_kubernetes(request.getfixturevalue("pods")))


def test_code_of_users_runs_in_no_container_with_a_secret_of_the_service(containers: list[Container]) -> None:
    running = [one for one in containers if one.runs_user_code]
    assert len(running) >= 3 and any("node" in one.name for one in running), "head, nodes, the node of the gateway"
    for one in running:
        assert one.secrets <= RAY_TOKEN, one
        assert not [name for name in one.variables if name.startswith("SHOAL_")], one


def test_code_of_users_runs_as_a_user_who_has_no_secret_of_the_service(containers: list[Container]) -> None:
    users = {one.user for one in containers if one.runs_user_code}
    holders = {one.user: one.name for one in containers if one.secrets - RAY_TOKEN or one.volumes & KEPT}
    assert len(holders) == 2, "control plane and gateway"
    assert 0 not in users and not users & holders.keys(), holders


def test_code_of_users_shares_no_volume_with_the_database_or_a_token(containers: list[Container]) -> None:
    holders = {one.name for one in containers if one.volumes & KEPT}
    assert holders, "the control plane has its state somewhere"
    for one in containers:
        assert not (one.runs_user_code and one.volumes & KEPT), one


def test_no_container_of_ray_has_a_token_of_kubernetes(pods: dict[str, dict[str, Any]]) -> None:
    for name, pod in pods.items():
        assert pod["automountServiceAccountToken"] is False, name


def test_workers_and_the_control_plane_have_a_group_in_common_for_checkpoints(containers: list[Container]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"install -d -m 2770 -o shoal-ray -g shoal /checkpoints", dockerfile)
    assert set(re.findall(r"useradd --uid \d+ --gid (\d+)", dockerfile)) == {"10001"}
