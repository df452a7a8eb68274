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

from sqlalchemy import Row, and_, case, delete, func, insert, select, true, update

from shoal_service.core.events import WebhookGaveUp
from shoal_service.core.webhooks import OF_JOBS, Retries, ServiceWebhook
from shoal_service.store import driving
from shoal_service.store.database import Transaction, events, in_projects, jobs, upsert, webhook_cursors, webhooks
from shoal_service.store.records import columns_for, load_spec, read_job_num
from shoal_service.views import WebhookView

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


def read_backlog(tx: Transaction, changed_since: float) -> list[Lane]:
    """Read the lanes with events after their cursor, of jobs that have changed since then."""
    changed = jobs.c.updated_at >= changed_since
    cursor = webhook_cursors
    columns = (jobs.c.num, jobs.c.id, jobs.c.event_seq, jobs.c.created_at, cursor)
    of_jobs = (
        select(*columns)
        .join(cursor, cursor.c.job_num == jobs.c.num)
        .where(changed, cursor.c.hook.startswith(JOB), jobs.c.event_seq > cursor.c.seq)
    )
    lanes = [_make_lane(row, row.hook, row.seq) for row in tx.execute(of_jobs)]
    for name, since in tx.execute(select(webhooks.c.name, webhooks.c.since)).all():
        hook = SERVICE + name
        of_service = (
            select(*columns)
            .outerjoin(cursor, and_(cursor.c.job_num == jobs.c.num, cursor.c.hook == hook))
            .where(changed, jobs.c.updated_at >= since, jobs.c.event_seq > func.coalesce(cursor.c.seq, 0))
        )
        for row in tx.execute(of_service).all():
            lane = _make_lane(row, hook, row.seq if row.seq is not None else _read_first_seq(tx, row, since))
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


def _make_lane(row: Row[*tuple[Any, ...]], hook: str, seq: int) -> Lane:
    retries = Retries(num_failed=row.num_failed or 0, failing_since=row.failing_since, next_at=row.next_at)
    return Lane(job_num=row.num, job_id=row.id, hook=hook, seq=seq, event_seq=row.event_seq, retries=retries)


def _read_first_seq(tx: Transaction, row: Row[*tuple[Any, ...]], since: float) -> int:
    """Return the number of the last event of a job before the hook was set."""
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


def read_lags(tx: Transaction) -> dict[str, WebhookLag]:
    """Return how far the hooks lag that do not deliver, by name; those of all specs together are `OF_JOBS`."""
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


_FAILS = webhook_cursors.c.waiting_since.is_not(None)
_SUMS = (
    func.coalesce(func.sum(webhook_cursors.c.delivered), 0).label("delivered"),
    func.coalesce(func.sum(webhook_cursors.c.gave_up), 0).label("gave_up"),
    func.count(webhook_cursors.c.waiting_since).label("failing"),
    func.min(webhook_cursors.c.waiting_since).label("waiting_since"),
    func.min(webhook_cursors.c.failing_since).label("failing_since"),
    func.min(webhook_cursors.c.next_at).label("next_at"),
    func.max(webhook_cursors.c.delivered_at).label("delivered_at"),
    func.coalesce(func.max(case((_FAILS, webhook_cursors.c.error), else_="")), "").label("error"),
)
"""What a WebhookView shows of the lanes of a hook."""


def read_views(
    tx: Transaction, job_id: str | None = None, *, limit: int = 100, visible: Collection[str] | None = None
) -> list[WebhookView]:
    """Return the hooks of the settings for a job, then those of its spec. Raises JobNotFound.

    Without a job: the hooks of the settings over all jobs; then the hooks of specs whose events wait after a failed
    attempt, those that wait longest first, at most `limit`.

    Args:
        visible: without a job, only hooks of specs of these projects.
    """
    cursor = webhook_cursors.c
    of_job = true() if job_id is None else cursor.job_num == read_job_num(tx, job_id)
    views = []
    if job_id is not None or visible is None:
        lanes = and_(cursor.hook == SERVICE + webhooks.c.name, of_job)
        of_settings = select(webhooks, *_SUMS).outerjoin(webhook_cursors, lanes).group_by(webhooks.c.name)
        for row in tx.execute(of_settings.order_by(webhooks.c.name)):
            hook = {"hook": SERVICE + row.name, "job_id": job_id, "events": tuple(json.loads(row.events))}
            views.append(WebhookView(**columns_for(WebhookView, row) | hook))
    of_specs = select(cursor.hook, jobs.c.num, jobs.c.id, *_SUMS).join(jobs, jobs.c.num == cursor.job_num)
    of_specs = of_specs.where(cursor.hook.startswith(JOB), of_job).group_by(jobs.c.num, cursor.hook)
    if job_id is None:
        failing = of_specs.where(_FAILS, in_projects(jobs.c.project, visible))
        of_specs = failing.order_by(func.min(cursor.waiting_since)).limit(limit)
    else:
        of_specs = of_specs.order_by(func.length(cursor.hook), cursor.hook)  # job/2 before job/10
    for row in tx.execute(of_specs).all():
        spec_hooks = load_spec(tx, row.num, 1).webhooks  # the same in every version
        number = int(row.hook.removeprefix(JOB))
        known = spec_hooks[number] if number < len(spec_hooks) else None
        hook = {"job_id": row.id, "receiver": known.receiver if known else "", "events": known.events if known else ()}
        views.append(WebhookView(**columns_for(WebhookView, row) | hook))
    return views
