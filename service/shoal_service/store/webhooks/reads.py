"""What is shown of webhooks: the state of their delivery, and the values of their metrics. Called by `Store`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, case, func, select

from shoal_service.core.webhooks import OF_JOBS
from shoal_service.store.records import load, load_spec
from shoal_service.store.tables import jobs, webhook_cursors, webhooks
from shoal_service.store.webhooks.cursors import JOB, SERVICE
from shoal_service.views import WebhookView
from shoal_workers.contract.spec import JobSpec


@dataclass(frozen=True, slots=True)
class WebhookLag:
    """The jobs whose events wait after a failed attempt."""

    failing: int
    waiting_since: float
    """Time of the oldest of these events."""


def lags(connection: Connection) -> dict[str, WebhookLag]:
    """By the name of the hook; those of all specs together are `OF_JOBS`. Hooks that deliver are not in it."""
    cursor = webhook_cursors.c
    query = (
        select(cursor.hook, func.count(), func.min(cursor.waiting_since))
        .where(cursor.waiting_since.is_not(None))
        .group_by(cursor.hook)
    )
    found: dict[str, WebhookLag] = {}
    for hook, count, since in connection.execute(query):
        name = hook.removeprefix(SERVICE) if hook.startswith(SERVICE) else OF_JOBS
        before = found.get(name, WebhookLag(0, since))
        found[name] = WebhookLag(before.failing + count, min(before.waiting_since, since))
    return found


def of_all(connection: Connection, *, limit: int, visible: Collection[str] | None = None) -> list[WebhookView]:
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
    of_settings = connection.execute(select(webhooks).order_by(webhooks.c.name)).all() if visible is None else []
    for hook in of_settings:
        values = connection.execute(select(*sums).where(cursor.hook == SERVICE + hook.name)).one()
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
    return [*views, *(_of_job(connection, row, row.id) for row in connection.execute(query).all())]


def of_job(connection: Connection, job_id: str) -> list[WebhookView]:
    """The hooks of the settings for this job, then those of its spec. Raises JobNotFound."""
    job = load(connection, job_id)
    cursor = webhook_cursors.c
    rows = {row.hook: row for row in connection.execute(select(webhook_cursors).where(cursor.job_num == job.num))}
    views = []
    for hook in connection.execute(select(webhooks).order_by(webhooks.c.name)).all():
        row = rows.get(SERVICE + hook.name)
        views.append(_view(SERVICE + hook.name, job_id, hook.receiver, json.loads(hook.events), _values(row)))
    own = sorted((row for name, row in rows.items() if name.startswith(JOB)), key=lambda row: int(row.hook[len(JOB) :]))
    return [*views, *(_of_job(connection, row, job_id) for row in own)]


def _of_job(connection: Connection, row: Row[*tuple[Any, ...]], job_id: str) -> WebhookView:
    spec: JobSpec = load_spec(connection, row.job_num, 1)  # webhooks are the same in every version
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
