"""Servers that start at once on a database without tokens: one token of the owner, in the file and in the database."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import ADMIN_TOKEN_FILE, Role, new_token
from shoal_service.store import Store, credentials

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
        return [one.id for one in store.reading(credentials.list_tokens)() if one.role is Role.ADMIN]
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
