"""Webhooks: a lane for each hook and job, how far it has come, what waits, and how this is shown.

A lane is one hook for one job: its cursor, which is the number of the last event that is settled, and what is known of
its failures. Hooks of a spec have their cursors from the submission on. Those of the settings get one with the first
event that they settle; until then the lane begins with the first event after the hook was set. The events themselves
are those of the table of events. Nothing is sent here, and no secret is kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, and_, case, delete, func, insert, select, update

from shoal_service.core.events import WebhookGaveUp
from shoal_service.core.webhooks import OF_JOBS, Retries, ServiceWebhook
from shoal_service.store import driving
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.records import load, load_spec
from shoal_service.store.tables import events, jobs, webhook_cursors, webhooks
from shoal_service.views import WebhookView
from shoal_workers.contract import JobSpec

MAX_ERROR_CHARS = 300
SERVICE, JOB = "service/", "job/"
"""Beginnings of the names of hooks: of the settings, and of a spec."""
_NEW = {"num_failed": 0, "delivered": 0, "gave_up": 0, "error": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The lane of one hook and one job."""

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
    """Time of the first event after `seq` that the hook selects; None if there is none."""


def begin(tx: Transaction, job_num: int, num_hooks: int) -> None:
    """Begins the lanes of a new job's own hooks."""
    if num_hooks:
        rows = [{"job_num": job_num, "hook": f"{JOB}{number}", "seq": 0, **_NEW} for number in range(num_hooks)]
        tx.execute(insert(webhook_cursors), rows)


def register(tx: Transaction, hooks: Iterable[ServiceWebhook], *, now: float) -> None:
    """Makes these the hooks of the settings. A new one gets the events from now on; the cursors of others are
    deleted."""
    known = {row.name: row.since for row in tx.execute(select(webhooks.c.name, webhooks.c.since))}
    rows = [
        {
            "name": hook.name,
            "since": known.get(hook.name, now),
            "receiver": hook.receiver,
            "events": json.dumps(hook.events),
        }
        for hook in hooks
    ]
    upsert(tx, webhooks, rows)
    for name in known.keys() - {row["name"] for row in rows}:
        tx.execute(delete(webhooks).where(webhooks.c.name == name))
        tx.execute(delete(webhook_cursors).where(webhook_cursors.c.hook == SERVICE + name))


def backlog(tx: Transaction, changed_since: float) -> list[Lane]:
    """Reads the lanes with events after their cursor, of jobs that have changed since then."""
    changed = jobs.c.updated_at >= changed_since
    cursor = webhook_cursors
    lanes = []
    columns = (jobs.c.num, jobs.c.id, jobs.c.event_seq, jobs.c.created_at, cursor)
    of_jobs = (
        select(*columns)
        .join(cursor, cursor.c.job_num == jobs.c.num)
        .where(changed, cursor.c.hook.startswith(JOB), jobs.c.event_seq > cursor.c.seq)
    )
    lanes += [_lane(row, row.hook, row.seq) for row in tx.execute(of_jobs)]
    for name, since in tx.execute(select(webhooks.c.name, webhooks.c.since)).all():
        hook = SERVICE + name
        of_service = (
            select(*columns)
            .outerjoin(cursor, and_(cursor.c.job_num == jobs.c.num, cursor.c.hook == hook))
            .where(changed, jobs.c.updated_at >= since, jobs.c.event_seq > func.coalesce(cursor.c.seq, 0))
        )
        for row in tx.execute(of_service).all():
            lane = _lane(row, hook, row.seq if row.seq is not None else _first_seq(tx, row, since))
            if lane.event_seq > lane.seq:
                lanes.append(lane)
    return lanes


def settle(tx: Transaction, lane: Lane, seq: int, *, delivered: int, now: float) -> None:
    """Moves the cursor: events up to `seq` are delivered, or are not selected. `delivered`: how many of them were
    delivered."""
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
    _save(tx, lane, values, delivered=delivered)


def fail(tx: Transaction, lane: Lane, failure: Failure, gave_up: WebhookGaveUp | None, *, now: float) -> None:
    """Stores a failed attempt. `gave_up`: the event that the job gets if attempts end with it."""
    values = {
        "seq": failure.seq,
        "num_failed": failure.retries.num_failed,
        "failing_since": failure.retries.failing_since,
        "next_at": failure.retries.next_at,
        "waiting_since": failure.waiting_since,
        "error": failure.error[:MAX_ERROR_CHARS],
    }
    _save(tx, lane, values, lost=failure.num_given_up)
    if gave_up is not None:
        driving.record_event(tx, lane.job_id, gave_up, now=now)


def _save(tx: Transaction, lane: Lane, values: dict[str, Any], *, delivered: int = 0, lost: int = 0) -> None:
    """Writes the row of a lane. It is called under the lease, so no other process writes this row."""
    cursor = webhook_cursors
    counts = {"delivered": cursor.c.delivered + delivered, "gave_up": cursor.c.gave_up + lost}
    key = (cursor.c.job_num == lane.job_num, cursor.c.hook == lane.hook)
    if not tx.execute(update(cursor).where(*key).values(**values, **counts)).rowcount:
        row = {"job_num": lane.job_num, "hook": lane.hook, **_NEW, **values, "delivered": delivered, "gave_up": lost}
        tx.execute(insert(cursor), row)


def _lane(row: Row[*tuple[Any, ...]], hook: str, seq: int) -> Lane:
    retries = Retries(num_failed=row.num_failed or 0, failing_since=row.failing_since, next_at=row.next_at)
    return Lane(job_num=row.num, job_id=row.id, hook=hook, seq=seq, event_seq=row.event_seq, retries=retries)


def _first_seq(tx: Transaction, row: Row[*tuple[Any, ...]], since: float) -> int:
    """Number of the last event of a job before the hook was set."""
    if row.created_at >= since:
        return 0
    query = select(func.coalesce(func.max(events.c.seq), 0)).where(events.c.job_num == row.num, events.c.at < since)
    return int(tx.execute(query).scalar_one())


@dataclass(frozen=True, slots=True)
class WebhookLag:
    """The jobs whose events wait after a failed attempt."""

    failing: int
    waiting_since: float
    """Time of the oldest of these events."""


def lags(tx: Transaction) -> dict[str, WebhookLag]:
    """How far hooks lag, by the name of the hook; those of all specs together are `OF_JOBS`. Hooks that deliver are not
    in it."""
    cursor = webhook_cursors.c
    query = (
        select(cursor.hook, func.count(), func.min(cursor.waiting_since))
        .where(cursor.waiting_since.is_not(None))
        .group_by(cursor.hook)
    )
    lags_by_hook: dict[str, WebhookLag] = {}
    for hook, count, since in tx.execute(query):
        name = hook.removeprefix(SERVICE) if hook.startswith(SERVICE) else OF_JOBS
        before = lags_by_hook.get(name, WebhookLag(0, since))
        lags_by_hook[name] = WebhookLag(before.failing + count, min(before.waiting_since, since))
    return lags_by_hook


def views(
    tx: Transaction, job_id: str | None = None, *, limit: int = 100, visible: Collection[str] | None = None
) -> list[WebhookView]:
    """The hooks that concern a job; None means those of the settings, over all jobs, and at most `limit` hooks of specs
    that fail.

    `visible`: without a job only hooks of specs of these projects. Raises JobNotFound.
    """
    return _views_of_all(tx, limit=limit, visible=visible) if job_id is None else _views_of_job(tx, job_id)


def _views_of_all(tx: Transaction, *, limit: int, visible: Collection[str] | None = None) -> list[WebhookView]:
    """Each hook of the settings, over all jobs; then the hooks of specs whose events wait after a failed attempt, those
    that wait longest first, at most `limit`."""
    cursor = webhook_cursors.c
    sums = (
        func.coalesce(func.sum(cursor.delivered), 0),
        func.coalesce(func.sum(cursor.gave_up), 0),
        func.count(cursor.waiting_since),
        func.min(cursor.waiting_since),
        func.min(cursor.failing_since),
        func.min(cursor.next_at),
        func.max(cursor.delivered_at),
        func.coalesce(func.max(case((cursor.waiting_since.is_not(None), cursor.error), else_="")), ""),
    )
    views = []
    of_settings = tx.execute(select(webhooks).order_by(webhooks.c.name)).all() if visible is None else []
    for hook in of_settings:
        values = tx.execute(select(*sums).where(cursor.hook == SERVICE + hook.name)).one()
        views.append(_view(SERVICE + hook.name, None, hook.receiver, json.loads(hook.events), values))
    query = (
        select(webhook_cursors, jobs.c.id)
        .join(jobs, jobs.c.num == cursor.job_num)
        .where(cursor.hook.startswith(JOB), cursor.waiting_since.is_not(None))
        .order_by(cursor.waiting_since)
        .limit(limit)
    )
    if visible is not None:
        query = query.where(jobs.c.project.in_(sorted(visible)))
    return [*views, *(_of_job(tx, row, row.id) for row in tx.execute(query).all())]


def _views_of_job(tx: Transaction, job_id: str) -> list[WebhookView]:
    """The hooks of the settings for this job, then those of its spec. Raises JobNotFound."""
    job = load(tx, job_id)
    cursor = webhook_cursors.c
    rows = {row.hook: row for row in tx.execute(select(webhook_cursors).where(cursor.job_num == job.num))}
    views = []
    for hook in tx.execute(select(webhooks).order_by(webhooks.c.name)).all():
        row = rows.get(SERVICE + hook.name)
        views.append(_view(SERVICE + hook.name, job_id, hook.receiver, json.loads(hook.events), _values(row)))
    own = sorted((row for name, row in rows.items() if name.startswith(JOB)), key=lambda row: int(row.hook[len(JOB) :]))
    return [*views, *(_of_job(tx, row, job_id) for row in own)]


def _of_job(tx: Transaction, row: Row[*tuple[Any, ...]], job_id: str) -> WebhookView:
    spec: JobSpec = load_spec(tx, row.job_num, 1)  # webhooks are the same in every version
    number = int(row.hook.removeprefix(JOB))
    hook = spec.webhooks[number] if number < len(spec.webhooks) else None
    receiver, patterns = (hook.receiver, hook.events) if hook is not None else ("", ())
    return _view(row.hook, job_id, receiver, patterns, _values(row))


def _values(row: Row[*tuple[Any, ...]] | None) -> tuple[Any, ...]:
    if row is None:
        return 0, 0, 0, None, None, None, None, ""
    is_failing = row.waiting_since is not None
    times = (row.waiting_since, row.failing_since, row.next_at, row.delivered_at)
    return row.delivered, row.gave_up, int(is_failing), *times, row.error if is_failing else ""


def _view(hook: str, job_id: str | None, receiver: str, patterns: Any, values: Any) -> WebhookView:
    delivered, gave_up, failing, waiting_since, failing_since, next_at, delivered_at, error = values
    return WebhookView(
        hook=hook,
        job_id=job_id,
        receiver=receiver,
        events=tuple(patterns),
        delivered=delivered,
        gave_up=gave_up,
        failing=failing,
        waiting_since=waiting_since,
        failing_since=failing_since,
        next_at=next_at,
        delivered_at=delivered_at,
        error=error,
    )
