import hashlib

import pytest

from shoal_service.store import InvalidArchive, Store, archives
from shoal_service.store.archives import MAX_ARCHIVE_BYTES


def test_an_archive_is_stored_once_under_its_hash(store: Store) -> None:
    data = bytes(range(256)) * 4096
    name = hashlib.sha256(data).hexdigest()
    assert store.reading(archives.get)(name) is None
    assert not store.reading(archives.exists)(name)
    for _ in range(2):
        store.writing(archives.put)(archives.checked(name, data), now=1.0)
    assert store.reading(archives.exists)(name)
    assert store.reading(archives.get)(name) == data


def test_an_archive_with_another_digest_than_its_name_is_refused(store: Store) -> None:
    with pytest.raises(InvalidArchive, match="Send it again"):
        store.writing(archives.put)(archives.checked("0" * 64, b"data"), now=1.0)
    assert not store.reading(archives.exists)("0" * 64)


def test_an_archive_over_the_limit_is_refused(store: Store) -> None:
    data = b"\0" * (MAX_ARCHIVE_BYTES + 1)
    with pytest.raises(InvalidArchive, match="64 MiB"):
        store.writing(archives.put)(archives.checked(hashlib.sha256(data).hexdigest(), data), now=1.0)
