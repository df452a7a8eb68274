"""A real server on a free port with a real SQLite store, and the Python client that drives it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from shoal_api.client import Client
from shoal_api.http.app import create_app
from shoal_api.http.serving import make_server
from shoal_api.http.streams import Pace
from shoal_service.store import Store
from shoal_service.views import ClusterView


class StillCluster:
    """A cluster that never changes by itself."""

    def __init__(self) -> None:
        self.view = ClusterView(
            connected=True,
            address="127.0.0.1:6379",
            nodes=(),
            cpus_total=4.0,
            cpus_free=3.0,
            gpus_total=0.0,
            gpus_free=0.0,
            owner="me",
            epoch=1,
        )

    def snapshot(self) -> ClusterView:
        return self.view


@dataclass
class Service:
    """A running service, seen from the outside and from the inside."""

    url: str
    store: Store
    cluster: StillCluster
    http: httpx.Client
    client: Client
    observed: list[tuple[str, str, int]]
    stop: threading.Event


def start(store: Store, port: int = 0, heartbeat_s: float = 0.2) -> Iterator[Service]:
    cluster = StillCluster()
    registry = CollectorRegistry()
    Gauge("shoal_test_series", "Something to scrape.", registry=registry).set(1)
    observed: list[tuple[str, str, int]] = []
    app = create_app(
        store=store,
        cluster=cluster,
        registry=registry,
        version="1.2.3",
        observe=lambda method, route, status, seconds: observed.append((method, route, status)),
        pace=Pace(heartbeat_s=heartbeat_s, refresh_s=0.05),
    )
    listener = socket.create_server(("127.0.0.1", port))
    port = listener.getsockname()[1]
    server = make_server(app, host="127.0.0.1", port=port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as http, Client(url) as client:
            client.health()
            yield Service(url, store, cluster, http, client, observed, threading.Event())
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server does not stop"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path}/shoal.db")
    yield store
    store.close()


@pytest.fixture
def service(store: Store) -> Iterator[Service]:
    yield from start(store)


@pytest.fixture
def spec() -> dict[str, object]:
    return {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}}
