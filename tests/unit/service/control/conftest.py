from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_service.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A real one, with a database of its own."""
    store = Store.open(f"sqlite:///{tmp_path}/shoal.db")
    yield store
    store.close()
