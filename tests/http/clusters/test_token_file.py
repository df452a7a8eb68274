"""A gateway and a server that get the token of a cluster in a file each: no admin takes a step."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from doubles.running_gateway import RunningGateway, until
from shoal_service.access_views import ClusterTokenRequest, TokenRequest
from shoal_service.control.joined_clusters import JoinedCluster
from shoal_service.control.token_files import register_cluster_token
from shoal_service.core.access import Role, new_token
from shoal_service.home import Rejected
from shoal_service.problems import SettingsError
from shoal_service.store import Store, access, cluster_links

Make = Callable[..., RunningGateway]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster-token"
    path.write_text(f"{new_token()}\n")
    path.chmod(0o444)  # as secrets of containers are mounted
    return path


def test_a_gateway_joins_with_the_token_of_the_file(
    own_service: Any, store: Store, make_gateway: Make, cluster: JoinedCluster, file: Path
) -> None:
    register_cluster_token(store, file, "east", now=1.0)
    make_gateway(token=file.read_text().strip())
    until(lambda: cluster.connected, "the gateway has joined")


def test_the_token_of_the_file_is_of_that_cluster_only(own_service: Any, store: Store, file: Path) -> None:
    register_cluster_token(store, file, "east", now=1.0)
    token = file.read_text().strip()
    known = store.reading(access.find_principal_by_token)(token, now=1e12)
    assert known is not None and (known.role, known.cluster, known.projects) == (Role.GATEWAY, "east", None)
    headers = {"Authorization": f"Bearer {token}"}
    for path in ("/v1/jobs", "/v1/nodes", "/v1/tokens", "/metrics", "/v1/clusters/west/orders?life=" + "a" * 16):
        answer = httpx.get(f"{own_service.url}{path}", headers=headers, trust_env=False)
        assert answer.status_code == 403, path


def test_each_start_and_each_server_registers_it_once(store: Store, file: Path) -> None:
    """Two servers of one deployment start at the same time."""
    starts = [
        threading.Thread(target=register_cluster_token, args=(store, file, "east"), kwargs={"now": 1.0})
        for _ in range(4)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert [one.cluster for one in store.reading(access.list_tokens)() if one.role is Role.GATEWAY] == ["east"]


def test_a_revoked_token_of_the_file_stays_revoked(
    own_service: Any, store: Store, make_gateway: Make, cluster: JoinedCluster, file: Path, caplog: Any
) -> None:
    register_cluster_token(store, file, "east", now=1.0)
    token = file.read_text().strip()
    gateway = make_gateway(token=token)
    until(lambda: cluster.connected, "the gateway has joined")
    own_service.client.revoke_token(token.split("_")[1])
    gateway.wait()
    assert isinstance(gateway.error, Rejected)
    with caplog.at_level(logging.WARNING):
        register_cluster_token(store, file, "east", now=2.0)
    [record] = [one for one in caplog.records if one.message == "cluster_token.not_valid"]
    assert "write another token" in record.reason
    assert store.reading(access.find_principal_by_token)(token, now=3.0) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: .*No such file"),
        ("", "has no token of the form"),
        ("shoal_x", "has no token of the form"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(store: Store, tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=f"cluster_token_file {path} {words}"):
        register_cluster_token(store, path, "east", now=1.0)


def test_a_token_of_somebody_else_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "token"
    for token, words in (
        (
            store.writing(cluster_links.create_token)("west", ClusterTokenRequest(), by="t", now=1.0).token,
            "of the cluster west",
        ),
        (
            store.writing(access.create_token)(TokenRequest(name="ada", role=Role.ADMIN), by="t", now=1.0).token,
            "ada's, of role admin",
        ),
    ):
        path.write_text(token)
        with pytest.raises(SettingsError, match=f"{words}: give the cluster east one of its own"):
            register_cluster_token(store, path, "east", now=2.0)
