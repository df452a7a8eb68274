"""`shoal join` as a process: what it says, and how it ends. A real service; no Ray answers, so nothing is trained."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.fake_ray import FakeRay
from doubles.running_gateway import NODE, RunningGateway, until
from kit.certificates import make_certificates
from kit.processes.joined_clusters import Join
from kit.served_app import bare_app, served
from shoal_api.http.serving import HttpConfig
from shoal_service.access_views import ClusterTokenRequest
from shoal_service.store import Store, access, cluster_links

pytestmark = pytest.mark.slow

NO_RAY = ["--ray-address", "127.0.0.1:1"]
Started = Callable[..., Join]


def token_of(store: Store, cluster: str) -> str:
    return store.writing(cluster_links.create_token)(cluster, ClusterTokenRequest(), by="test", now=time.time()).token


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """`start(url, "--name", "east", token=...)`: a process, from this interpreter."""
    made: list[Join] = []

    def _start(*options: str, token: str | None = None, **environment: str) -> Join:
        if token is not None:
            environment["SHOAL_TOKEN"] = token
        path = {"PYTHONPATH": ":".join(one for one in sys.path if one)}
        made.append(Join(Path(sys.executable), tmp_path / f"join-{len(made)}", [*options], {**path, **environment}))
        return made[-1].start()

    yield _start
    for one in made:
        one.end()


def test_its_help_names_every_option(start: Started) -> None:
    joining = start("--help")
    assert joining.wait() == 0
    for option in ("--token-file", "--name", "--home-url", "--ray-address", "--ca-file", "--replace"):
        assert option in joining.output()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["shoal:8470"], "is not a valid URL"),
        (["http://127.0.0.1:1"], "no token of the cluster is given"),
        (["http://127.0.0.1:1", "--token-file", "/none"], "--token-file /none cannot be read"),
        (["http://127.0.0.1:1", "--token", "t", "--name", "East!"], "is not the name of a cluster"),
        (["http://127.0.0.1:1", "--token", "t", "--ca-file", "/none"], "--ca-file /none cannot be read"),
    ],
)
@pytest.mark.cells(1)
def test_what_cannot_be_meant_is_refused_before_anything_is_dialled(
    start: Started, options: list[str], words: str
) -> None:
    joining = start(*options)
    assert joining.wait() == 2
    assert words in " ".join(joining.output().split())


@pytest.mark.parametrize("kind", ["wrong", "revoked", "of west", "of a user"])
@pytest.mark.cells(2)
def test_a_gateway_whose_token_is_refused_ends_and_says_so(
    own_service: Any, store: Store, start: Started, kind: str
) -> None:
    from shoal_service.access_views import TokenRequest

    tokens = {
        "wrong": lambda: "shoal_00000000_" + "a" * 43,
        "revoked": lambda: token_of(store, "east"),
        "of west": lambda: token_of(store, "west"),
        "of a user": lambda: (
            store.writing(access.create_token)(TokenRequest(name="ada"), by="test", now=time.time()).token
        ),
    }
    words = {
        "wrong": "unknown, expired or revoked",
        "revoked": "unknown, expired or revoked",
        "of west": "The token is for the cluster 'west': join with --name west",
        "of a user": "needs the token of the cluster's gateway",
    }
    token = tokens[kind]()
    if kind == "revoked":
        store.writing(access.revoke_token)(token[6:14], now=time.time())
    joining = start(own_service.url, "--name", "east", *NO_RAY, token=token)
    assert joining.wait() == 1
    assert f"gateway: the service at {own_service.url} refuses this gateway" in joining.output()
    assert words[kind] in joining.output() and token not in joining.output()


def test_an_address_at_which_no_service_is_ends_in_words(start: Started, tmp_path: Path) -> None:
    """Something answers there, and is no Shoal service."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        joining = start(f"http://127.0.0.1:{other.server_port}", *NO_RAY, token="shoal_00000000_" + "a" * 43)
        assert joining.wait() == 1
        assert "is this a Shoal service?" in joining.output()
        other.shutdown()


def test_an_address_at_which_nothing_answers_is_tried_again_until_it_is_stopped(start: Started) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    joining = start(f"http://127.0.0.1:{port}", *NO_RAY, token="shoal_00000000_" + "a" * 43)
    joining.wait_to_say("Trying again; what runs in this cluster goes on.")
    joining.send(signal.SIGTERM)
    assert joining.wait() == 0


@pytest.mark.matrix
def test_one_whose_name_another_gateway_has_stands_by_and_says_so(
    own_service: Any, store: Store, start: Started
) -> None:
    ray = FakeRay(NODE)
    ray.ray_cluster = "a1"
    first = RunningGateway(own_service.url, token_of(store, "east"), ray=ray).start()
    until(lambda: any("joined" in line for line in first.lines), "the first one has joined")
    try:
        joining = start(own_service.url, "--name", "east", *NO_RAY, token=token_of(store, "east"))
        joining.wait_to_say("Another gateway has spoken for the cluster 'east'")
        joining.send(signal.SIGTERM)
        assert joining.wait() == 0
    finally:
        first.stop()


@pytest.fixture
def authority(tmp_path: Path) -> tuple[Path, Path, Path]:
    """See `make_certificates`."""
    return make_certificates(tmp_path / "tls")


@pytest.fixture
def https(store: Store, authority: tuple[Path, Path, Path]) -> Iterator[str]:
    app = bare_app(store)
    with served(app, http=HttpConfig(authority[1], authority[2])) as url:
        yield url


@pytest.mark.parametrize("kind", ["its own", "another", "none"])
@pytest.mark.cells(2)
def test_a_service_of_a_private_authority_is_joined_with_the_authority_s_file_only(
    https: str, store: Store, start: Started, authority: tuple[Path, Path, Path], tmp_path: Path, kind: str
) -> None:
    files = {"its own": authority[0], "another": make_certificates(tmp_path / "other")[0]}
    given = ["--ca-file", str(files[kind])] if kind in files else []
    joining = start(https, "--name", "east", *given, *NO_RAY, token=token_of(store, "east"))
    if kind == "its own":
        joining.wait_to_say("gateway: the service has this cluster")
    else:
        said = joining.wait_to_say("Trying again")
        assert "certificate of the service cannot be verified" in said and "--ca-file" in said
        assert store.reading(cluster_links.read_newest_report)("east") == ("", 0)
    joining.send(signal.SIGTERM)
    assert joining.wait() == 0
