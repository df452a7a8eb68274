"""The owner of the lease that has ended is seen, and servers that start at once make one token."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import ADMIN_TOKEN_FILE, Role, new_token
from shoal_service.store import Store, access

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
    assert not store.is_owner_gone("other-host") and not store.is_owner_gone("another")
    assert store.acquire_lease("me", ttl_s=10, now=101.0) is None
    owner.kill()
    owner.wait()
    if store_url.startswith("sqlite"):
        assert not store.is_owner_gone("other-host"), (
            "it cannot be known; the processes are on one machine, see ownership"
        )
        return
    _await_departure(store)
    store.release_lease("other-host")
    taken = store.acquire_lease("me", ttl_s=10, now=102.0)
    assert taken is not None and taken.epoch == 2 and not store.is_owner_gone("me")


@pytest.mark.postgres
def test_a_broken_connection_is_announced_again_with_the_next_renewal(store_url: str, store: Store) -> None:
    if store_url.startswith("sqlite"):
        pytest.skip("there is no connection to break")
    store.acquire_lease("me", ttl_s=10, now=101.0)
    assert not store.is_owner_gone("me")
    store._database.release_presence()
    _await_departure(store, "me")
    assert store.acquire_lease("me", ttl_s=10, now=102.0) is not None
    assert not store.is_owner_gone("me")


def test_an_owner_of_an_older_release_is_never_thought_gone(store: Store) -> None:
    store.acquire_lease("me", ttl_s=10, now=101.0)
    with store._database.write() as tx:
        tx.connection.exec_driver_sql("UPDATE lease SET owner = 'older', epoch = 2")
    assert not store.is_owner_gone("older")


def _await_departure(store: Store, owner: str = "other-host") -> None:
    """The server of PostgreSQL notices the end of a connection by itself, and notifies nobody."""
    deadline = time.monotonic() + 60.0
    while not store.is_owner_gone(owner):
        assert time.monotonic() < deadline, "the lock outlives its connection"


_SERVERS = 4


def start_together(url: str, directories: list[Path]) -> list[Exception]:
    """Each opens the database, whose tables are there, and looks for its token at the same moment; what failed."""
    Store.open(url).close()
    failures: list[Exception] = []
    together = threading.Barrier(len(directories))

    def start(directory: Path) -> None:
        try:
            with closing(Store.open(url)) as store:
                together.wait(60)
                ensure_admin_token(store, directory, now=1.0)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(one,)) for one in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def admins(url: str) -> list[str]:
    """Ids of the tokens of role admin."""
    store = Store.open(url)
    try:
        return [one.id for one in store.reading(access.list_tokens)() if one.role is Role.ADMIN]
    finally:
        store.close()


def test_servers_with_a_file_of_the_same_token_register_it_once(empty_url: str, tmp_path: Path) -> None:
    """The file of a secret that is mounted into each container."""
    token = new_token()
    directories = [tmp_path / f"server-{number}" for number in range(_SERVERS)]
    for directory in directories:
        directory.mkdir()
        (directory / ADMIN_TOKEN_FILE).touch(mode=0o600)
        (directory / ADMIN_TOKEN_FILE).write_text(f"{token}\n")
    assert start_together(empty_url, directories) == []
    assert admins(empty_url) == [token[6:14]]


@pytest.mark.parametrize("trial", range(3))
def test_servers_of_one_state_directory_make_one_token(empty_url: str, tmp_path: Path, trial: int) -> None:
    """On several machines, over a file system without locks."""
    assert start_together(empty_url, [tmp_path] * _SERVERS) == []
    made = (tmp_path / ADMIN_TOKEN_FILE).read_text().strip()
    assert admins(empty_url) == [made[6:14]]
    assert [path.name for path in tmp_path.glob("admin-token*")] == ["admin-token"]
