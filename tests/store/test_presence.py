"""A control plane on another host sees that the owner of the lease has ended, before the lease expires."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shoal_service.store import Store

_OWN = """
import sys
from shoal_service.store import Store
store = Store.open(sys.argv[1])
assert store.acquire_lease("other-host", ttl_s=1e6, now=100.0) is not None
print("owns", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(store_url: str, store: Store) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _OWN, store_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "owns\n"
        yield process
        process.kill()


def test_the_end_of_the_owners_process_is_seen_by_its_connection(
    owner: subprocess.Popen[str], store: Store, store_url: str
) -> None:
    assert not store.has_left("other-host") and not store.has_left("another")
    assert store.acquire_lease("me", ttl_s=10, now=101.0) is None
    owner.kill()
    owner.wait()
    if store_url.startswith("sqlite"):
        assert not store.has_left("other-host"), "it cannot be known; the processes are on one machine, see ownership"
        return
    _await_departure(store)
    store.release_lease("other-host")
    taken = store.acquire_lease("me", ttl_s=10, now=102.0)
    assert taken is not None and taken.epoch == 2 and not store.has_left("me")


@pytest.mark.postgres
def test_a_broken_connection_is_announced_again_with_the_next_renewal(store_url: str, store: Store) -> None:
    if store_url.startswith("sqlite"):
        pytest.skip("there is no connection to break")
    store.acquire_lease("me", ttl_s=10, now=101.0)
    assert not store.has_left("me")
    store._database.withdraw()
    _await_departure(store, "me")
    assert store.acquire_lease("me", ttl_s=10, now=102.0) is not None
    assert not store.has_left("me")


def test_an_owner_of_an_older_release_is_never_thought_gone(store: Store) -> None:
    store.acquire_lease("me", ttl_s=10, now=101.0)
    with store._database.write() as tx:
        tx.connection.exec_driver_sql("UPDATE lease SET owner = 'older', epoch = 2")
    assert not store.has_left("older")


def _await_departure(store: Store, owner: str = "other-host") -> None:
    """The server of PostgreSQL notices the end of a connection by itself, and notifies nobody."""
    deadline = time.monotonic() + 60.0
    while not store.has_left(owner):
        assert time.monotonic() < deadline, "the lock outlives its connection"
