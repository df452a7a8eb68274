"""Whether a database is whole: what a restore must prove before a server uses it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, text

from shoal_service.store.backup.errors import BackupError
from shoal_service.store.database import Database
from shoal_service.store.records import read_spec
from shoal_service.store.tables import code_archives, events, job_specs, jobs

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Contents:
    """What a database holds."""

    schema: str
    """Revision of the migrations."""
    jobs: int
    events: int
    archives: int
    newest_at: float | None
    """When a job was last changed; None: there is none."""
    unreadable: int
    """Jobs whose spec this release cannot read. They were so before."""


def check(database: Database) -> Contents:
    """Raises BackupError: the database is damaged, or its tables contradict each other."""
    with database.read() as tx:
        if database.is_sqlite:
            found = list(tx.execute(text("PRAGMA integrity_check(5)")).scalars())
            if found != ["ok"]:
                raise BackupError(f"the database is damaged: {'; '.join(found)}")
            broken = len(tx.execute(text("PRAGMA foreign_key_check")).all())
            if broken:
                raise BackupError(f"{broken} rows refer to jobs that do not exist")
        last = select(events.c.job_num, func.max(events.c.seq).label("seq")).group_by(events.c.job_num).subquery()
        behind = (
            select(jobs.c.id)
            .outerjoin(last, last.c.job_num == jobs.c.num)
            .where(func.coalesce(last.c.seq, 0) != jobs.c.event_seq)
        )
        _none(list(tx.execute(behind.limit(_SHOWN)).scalars()), "have other events than their rows say")
        spec = (job_specs.c.job_num == jobs.c.num) & (job_specs.c.version == jobs.c.spec_version)
        lacking = select(jobs.c.id).outerjoin(job_specs, spec).where(job_specs.c.version.is_(None))
        _none(list(tx.execute(lacking.limit(_SHOWN)).scalars()), "have no spec")
        versions = tx.execute(select(jobs.c.num, jobs.c.spec_version)).all()
        return Contents(
            schema=tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one(),
            jobs=len(versions),
            events=tx.execute(select(func.count()).select_from(events)).scalar_one(),
            archives=tx.execute(select(func.count()).select_from(code_archives)).scalar_one(),
            newest_at=tx.execute(select(func.max(jobs.c.updated_at))).scalar_one(),
            unreadable=sum(bool(read_spec(tx, row.num, row.spec_version).problem) for row in versions),
        )


def _none(job_ids: list[str], what: str) -> None:
    if job_ids:
        raise BackupError(f"jobs {what}: {', '.join(job_ids)}")
