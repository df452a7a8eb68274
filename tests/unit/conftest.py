"""A store for the tests that need a database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.databases import MigratedDatabases
from shoal_service.store.store import Store


@pytest.fixture
def store(tmp_path: Path, migrated: MigratedDatabases) -> Iterator[Store]:
    """A real one, with a database of its own."""
    store = Store.open(migrated.sqlite(tmp_path / "shoal.db"))
    yield store
    store.close()
