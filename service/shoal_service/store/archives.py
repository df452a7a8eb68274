"""Packed code directories of jobs, by the SHA-256 of their bytes: stored once, never changed; retention deletes those
that no job names. Called by `Store`.
"""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, select

from shoal_service.store.database import insert
from shoal_service.store.errors import InvalidArchive
from shoal_service.store.tables import code_archives

MAX_ARCHIVE_BYTES = 64 * 1024 * 1024


def check(sha256: str, data: bytes) -> None:
    """Raises InvalidArchive. Hashes the data: call it outside a transaction."""
    if len(data) > MAX_ARCHIVE_BYTES:
        raise InvalidArchive(
            f"The code archive has {len(data)} bytes, the limit is {MAX_ARCHIVE_BYTES} (64 MiB). "
            "Keep data and checkpoints out of code.working_dir."
        )
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise InvalidArchive(f"The code archive is named {sha256[:64]}, but its SHA-256 is {actual}. Send it again.")


def put(connection: Connection, sha256: str, data: bytes, *, now: float) -> None:
    """An archive that is stored already counts as uploaded now: the job that needs it is about to be submitted."""
    statement = insert(connection, code_archives).values(sha256=sha256, bytes=len(data), stored_at=now, data=data)
    connection.execute(statement.on_conflict_do_update(index_elements=["sha256"], set_={"stored_at": now}))


def exists(connection: Connection, sha256: str) -> bool:
    query = select(code_archives.c.bytes).where(code_archives.c.sha256 == sha256)
    return connection.execute(query).one_or_none() is not None


def get(connection: Connection, sha256: str) -> bytes | None:
    data: bytes | None = connection.execute(
        select(code_archives.c.data).where(code_archives.c.sha256 == sha256)
    ).scalar_one_or_none()
    return data
