"""Code of jobs: packed directories by the SHA-256 of their bytes, and the versions of the code in a job's spec.

An archive is stored once and never changed; retention deletes those that no spec names. If the supervisor refuses a
version of the code or rolls it back, the spec returns to the code before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, insert, select

from shoal_service.core.events import CodeRefused, CodeRolledBack
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.reports import PendingEvent
from shoal_service.store.database import Transaction, code_archives, insert_on_conflict, job_specs, json_text
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import InvalidArchive, RequestConflict
from shoal_service.store.records import JobRecord, read_spec
from shoal_workers.contract import JobSpec

MAX_ARCHIVE_BYTES = 64 * 1024 * 1024
_REJECTED_CODE = (CodeRefused.type, CodeRolledBack.type)


@dataclass(frozen=True, slots=True)
class Archive:
    """A packed directory whose size and SHA-256 were checked by `check`."""

    sha256: str
    data: bytes


def check(sha256: str, data: bytes) -> Archive:
    """Check the size and the SHA-256 of an archive. Call it before a transaction: hashing takes time.

    Raises:
        InvalidArchive: the archive is too large, or has another SHA-256.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise InvalidArchive(
            f"The code archive has {len(data)} bytes, the limit is {MAX_ARCHIVE_BYTES} (64 MiB). "
            "Keep data and checkpoints out of code.working_dir."
        )
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise InvalidArchive(f"The code archive is named {sha256[:64]}, but its SHA-256 is {actual}. Send it again.")
    return Archive(sha256, data)


def put(tx: Transaction, archive: Archive, *, now: float) -> None:
    """Store an archive. If it is stored already, only the time of its upload changes."""
    # the job that needs it is about to be submitted, and retention looks at the time of the upload
    row = {"sha256": archive.sha256, "bytes": len(archive.data), "stored_at": now, "data": archive.data}
    statement = insert_on_conflict(tx, code_archives).values(row)
    tx.execute(statement.on_conflict_do_update(index_elements=["sha256"], set_={"stored_at": now}))


def exists(tx: Transaction, sha256: str) -> bool:
    query = select(code_archives.c.bytes).where(code_archives.c.sha256 == sha256)
    return tx.execute(query).one_or_none() is not None


def get(tx: Transaction, sha256: str) -> bytes | None:
    data: bytes | None = tx.execute(
        select(code_archives.c.data).where(code_archives.c.sha256 == sha256)
    ).scalar_one_or_none()
    return data


def find_unused(tx: Transaction, *, before: float, limit: int = 100) -> list[str]:
    """Return the archives that were last uploaded before that time and that the spec of no job names."""
    query = select(code_archives.c.sha256).where(code_archives.c.stored_at < before, _is_unused(tx))
    return list(tx.execute(query.order_by(code_archives.c.stored_at).limit(limit)).scalars())


def remove(tx: Transaction, sha256: str, *, before: float) -> bool:
    """Delete an archive. Return False if a spec names it now, or it was uploaded again."""
    conditions = (code_archives.c.sha256 == sha256, code_archives.c.stored_at < before, _is_unused(tx))
    return tx.execute(delete(code_archives).where(*conditions)).rowcount > 0


def _is_unused(tx: Transaction) -> ColumnElement[bool]:
    archive = json_text(tx, job_specs.c.document, "code", "archive")
    return code_archives.c.sha256.not_in(select(archive).where(archive.is_not(None)))


def require_changeable(job: JobRecord, before: JobSpec, after: JobSpec) -> None:
    """Refuse a change of code that cannot take effect. Raises RequestConflict."""
    if after.code == before.code:
        return
    # workers with new code start before the old ones end, and two workers cannot hold one GPU
    if before.worker.gpus and job.state in ATTEMPT_STATES:
        action = "be given new code while its workers hold GPUs. Pause it, change the code, and resume it"
        raise RequestConflict(job.id, job.state, action)
    if before.code.archive is None and before.code.working_dir is None:
        raise RequestConflict(job.id, job.state, f"be given code: its task {before.task} is not from code of its own")


def restore_code(edit: JobEdit, event: PendingEvent) -> None:
    """Return the spec to the code before, if the supervisor did so and no other code was requested since."""
    if event.type not in _REJECTED_CODE:
        return
    # otherwise the next attempt would begin with code that has failed
    job, tx = edit.job, edit.tx
    newest = edit.spec_version
    stored = read_spec(tx, job.num, newest)
    if stored.problem or stored.value.code.archive != event.data.get("version"):
        return
    versions = select(job_specs.c.version).where(job_specs.c.job_num == job.num, job_specs.c.version < newest)
    for version in tx.execute(versions.order_by(job_specs.c.version.desc())).scalars():
        earlier = read_spec(tx, job.num, version)
        if not earlier.problem and (earlier.value.code.archive or "") == event.data.get("before"):
            spec = stored.value.model_copy(update={"code": earlier.value.code})
            row = {"job_num": job.num, "version": newest + 1, "accepted_at": edit.now}
            tx.execute(insert(job_specs), row | {"document": spec.model_dump_json()})
            edit.set(spec_version=newest + 1)
            return
