"""Cursors of webhooks, as functions of an open transaction. Called by `WebhookMethods`.

A lane is one hook for one job: its cursor, and what is known of its failures. Hooks of a spec have their cursors from
the submission on. Those of the settings get one with the first event that they settle; until then the lane begins with
the first event after the hook was set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, func, insert, select, update

from shoal_service.core.webhooks import Retries, ServiceWebhook
from shoal_service.store.database import upsert
from shoal_service.store.tables import events, jobs, webhook_cursors, webhooks

MAX_ERROR_CHARS = 300
SERVICE, JOB = "service/", "job/"
"""Beginnings of the names of hooks: of the settings, and of a spec."""
_NEW = {"num_failed": 0, "delivered": 0, "gave_up": 0, "error": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One hook for one job."""

    job_num: int
    job_id: str
    hook: str
    seq: int
    """Number of the last settled event."""
    event_seq: int
    """Number of the job's last event."""
    retries: Retries

    @property
    def key(self) -> tuple[str, str]:
        return self.hook, self.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt, and what follows from it."""

    retries: Retries
    error: str
    seq: int
    """Number of the last event that needs no further attempt; those that are given up are among them."""
    num_given_up: int
    waiting_since: float | None
    """Time of the first event after `seq` that the hook selects; None: there is none."""


def begin(connection: Connection, job_num: int, num_hooks: int) -> None:
    """The cursors of a new job's own hooks."""
    if num_hooks:
        rows = [{"job_num": job_num, "hook": f"{JOB}{number}", "seq": 0, **_NEW} for number in range(num_hooks)]
        connection.execute(insert(webhook_cursors), rows)


def register(connection: Connection, hooks: Iterable[ServiceWebhook], *, now: float) -> None:
    """These are the hooks of the settings. A new one gets the events from now on; the cursors of others are deleted."""
    known = {row.name: row.since for row in connection.execute(select(webhooks.c.name, webhooks.c.since))}
    rows = [
        {
            "name": hook.name,
            "since": known.get(hook.name, now),
            "receiver": hook.receiver,
            "events": json.dumps(hook.events),
        }
        for hook in hooks
    ]
    upsert(connection, webhooks, rows)
    for name in known.keys() - {row["name"] for row in rows}:
        connection.execute(delete(webhooks).where(webhooks.c.name == name))
        connection.execute(delete(webhook_cursors).where(webhook_cursors.c.hook == SERVICE + name))


def backlog(connection: Connection, changed_since: float) -> list[Lane]:
    """The lanes with events after their cursor, of jobs that have changed since then."""
    changed = jobs.c.updated_at >= changed_since
    cursor = webhook_cursors
    found = []
    columns = (jobs.c.num, jobs.c.id, jobs.c.event_seq, jobs.c.created_at, cursor)
    of_jobs = (
        select(*columns)
        .join(cursor, cursor.c.job_num == jobs.c.num)
        .where(changed, cursor.c.hook.startswith(JOB), jobs.c.event_seq > cursor.c.seq)
    )
    found += [_lane(row, row.hook, row.seq) for row in connection.execute(of_jobs)]
    for name, since in connection.execute(select(webhooks.c.name, webhooks.c.since)).all():
        hook = SERVICE + name
        of_service = (
            select(*columns)
            .outerjoin(cursor, and_(cursor.c.job_num == jobs.c.num, cursor.c.hook == hook))
            .where(changed, jobs.c.updated_at >= since, jobs.c.event_seq > func.coalesce(cursor.c.seq, 0))
        )
        for row in connection.execute(of_service).all():
            lane = _lane(row, hook, row.seq if row.seq is not None else _first_seq(connection, row, since))
            if lane.event_seq > lane.seq:
                found.append(lane)
    return found


def settle(connection: Connection, lane: Lane, seq: int, *, delivered: int, now: float) -> None:
    """Events up to `seq` are delivered, or are not selected; `delivered`: how many of them were delivered."""
    values: dict[str, Any] = {"seq": seq}
    if delivered:
        values |= {
            "num_failed": 0,
            "failing_since": None,
            "next_at": None,
            "waiting_since": None,
            "delivered_at": now,
            "error": "",
        }
    _save(connection, lane, values, delivered=delivered)


def fail(connection: Connection, lane: Lane, failure: Failure) -> None:
    """An attempt has failed."""
    values = {
        "seq": failure.seq,
        "num_failed": failure.retries.num_failed,
        "failing_since": failure.retries.failing_since,
        "next_at": failure.retries.next_at,
        "waiting_since": failure.waiting_since,
        "error": failure.error[:MAX_ERROR_CHARS],
    }
    _save(connection, lane, values, lost=failure.num_given_up)


def _save(connection: Connection, lane: Lane, values: dict[str, Any], *, delivered: int = 0, lost: int = 0) -> None:
    """Called under the lease, so no other process writes this row."""
    cursor = webhook_cursors
    counts = {"delivered": cursor.c.delivered + delivered, "gave_up": cursor.c.gave_up + lost}
    key = (cursor.c.job_num == lane.job_num, cursor.c.hook == lane.hook)
    if not connection.execute(update(cursor).where(*key).values(**values, **counts)).rowcount:
        row = {"job_num": lane.job_num, "hook": lane.hook, **_NEW, **values, "delivered": delivered, "gave_up": lost}
        connection.execute(insert(cursor), row)


def _lane(row: Row[*tuple[Any, ...]], hook: str, seq: int) -> Lane:
    retries = Retries(num_failed=row.num_failed or 0, failing_since=row.failing_since, next_at=row.next_at)
    return Lane(job_num=row.num, job_id=row.id, hook=hook, seq=seq, event_seq=row.event_seq, retries=retries)


def _first_seq(connection: Connection, row: Row[*tuple[Any, ...]], since: float) -> int:
    """Number of the last event of a job before the hook was set."""
    if row.created_at >= since:
        return 0
    query = select(func.coalesce(func.max(events.c.seq), 0)).where(events.c.job_num == row.num, events.c.at < since)
    return int(connection.execute(query).scalar_one())
