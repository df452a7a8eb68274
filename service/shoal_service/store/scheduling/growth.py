"""Why running jobs have fewer workers than they may have, as the scheduler's last pass explained it. Stored, so that
every server can answer.

A change of the spec is a request, so it is answered with an event if the job is held back then. The row of a job
remembers which version was answered, and outlives its attempts. It is shown as long as the job has the grant that the
answer is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from shoal_service.core.events.job import JobHeldBack
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.fleet_views import HeldBackJob
from shoal_service.store import driving
from shoal_service.store.database import upsert
from shoal_service.store.records import GROWTH_COLUMNS, growth_answer_of
from shoal_service.store.tables import growth_answers, jobs

REWRITE_S = 10.0
"""Words that differ only in their numbers are written again after this time."""
_NOTHING = {"limit": "", "reason": ""}


def save(
    connection: Connection, answers: Sequence[HeldBack], versions: Mapping[str, int], *, now: float
) -> tuple[list[str], int]:
    """The jobs that got an event, and the number of rows that were written.

    Args:
        answers: for the jobs that are held back.
        versions: the version of the spec that the scheduler has considered, of each running job.
    """
    held = {answer.job_id: answer for answer in answers}
    written, events = [], []
    for row in connection.execute(_running()).all():
        version = versions.get(row.id)
        if version is None:
            continue  # it has started since
        after = _row(row, held.get(row.id), version, now)
        if after is None or not _differs(row, after, now):
            continue
        written.append(after)
        answer = held.get(row.id)
        if answer is not None and after["spec_version"] > max(1, row.answered_version or 1):
            event = JobHeldBack(
                workers=answer.workers, max_workers=answer.max_workers, limit=answer.limit.value, reason=answer.reason
            )
            driving.record_event(connection, row.id, event, now=now)
            events.append(row.id)
    upsert(connection, growth_answers, written)
    return events, len(written)


def read(connection: Connection, *, limit: int) -> tuple[HeldBackJob, ...]:
    """The running jobs that are held back, oldest first."""
    found = []
    for row in connection.execute(_running().where(growth_answers.c.limit != "")):
        answer = growth_answer_of(row)
        if answer is not None:
            found.append(
                HeldBackJob(
                    job_id=row.id,
                    name=row.name,
                    project=row.project,
                    user=row.user,
                    priority=row.priority,
                    workers=row.granted_workers,
                    answer=answer,
                )
            )
    return tuple(found[:limit])


def _running() -> Any:
    columns = (jobs.c.num, jobs.c.id, jobs.c.name, jobs.c.project, jobs.c.user, jobs.c.priority, jobs.c.granted_workers)
    return (
        select(*columns, growth_answers.c.spec_version.label("answered_version"), *GROWTH_COLUMNS)
        .outerjoin(growth_answers, growth_answers.c.job_num == jobs.c.num)
        .where(jobs.c.state.in_(sorted(state.value for state in ATTEMPT_STATES)))
        .order_by(jobs.c.num)
    )


def _row(row: Row[Any], answer: HeldBack | None, version: int, now: float) -> dict[str, Any] | None:
    """None: there is nothing to remember of a job whose spec was never changed."""
    if answer is None and version == 1 and row.answered_version is None:
        return None
    if answer is not None and answer.limit is GrowthLimit.SOON:
        version = row.answered_version or 1  # no answer yet to what was changed
    words = _NOTHING if answer is None else {"limit": answer.limit.value, "reason": answer.reason}
    return {
        "job_num": row.num,
        "spec_version": version,
        "workers": row.granted_workers if answer is None else answer.workers,
        "max_workers": row.granted_workers if answer is None else answer.max_workers,
        **words,
        "decided_at": now,
    }


def _differs(row: Row[Any], after: Mapping[str, Any], now: float) -> bool:
    if row.answered_version is None:
        return True
    before = (row.answered_version, row.answered_workers, row.max_workers, row.growth_limit)
    if before != (after["spec_version"], after["workers"], after["max_workers"], after["limit"]):
        return True
    return bool(row.growth_reason != after["reason"] and not 0 <= now - row.growth_decided_at < REWRITE_S)
