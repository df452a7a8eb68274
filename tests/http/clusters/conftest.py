"""A cluster that joins a real service over HTTP: a real gateway, with a fake in place of Ray."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from doubles.blocking_cluster import BlockingCluster
from doubles.running_gateway import RunningGateway
from shoal_service.access_views import ClusterTokenRequest
from shoal_service.clock import SystemClock
from shoal_service.control.joined_clusters import JoinedCluster
from shoal_service.store import Lease, Store, cluster_links


@pytest.fixture
def lease(store: Store, own_service: Any) -> Lease:
    """The lease of the control plane whose edge the service is."""
    lease = store.read_lease()
    assert lease is not None
    return lease


@pytest.fixture
def make_gateway(store: Store, own_service: Any) -> Iterator[Callable[..., RunningGateway]]:
    """`make_gateway()`: one that runs, with a token of its own."""
    made: list[RunningGateway] = []

    def make(**changes: Any) -> RunningGateway:
        token = changes.pop("token", None)
        if token is None:
            token = store.writing(cluster_links.create_token)(
                "east", ClusterTokenRequest(), by="test", now=time.time()
            ).token
        made.append(RunningGateway(changes.pop("url", own_service.url), token, **changes).start())
        return made[-1]

    yield make
    for gateway in made:
        gateway.stop()


@pytest.fixture
def cluster(store: Store, lease: Lease) -> Iterator[BlockingCluster]:
    """What the control plane with the lease sees of the cluster east."""
    with closing(JoinedCluster(store, "east", SystemClock(), lambda: lease).start()) as joined:
        yield BlockingCluster(joined)
