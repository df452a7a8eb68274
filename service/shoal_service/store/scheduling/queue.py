"""The order of the queue: position, reason, holders and expected start of each queued job, as the scheduler's last pass
explained them. Stored, so that every server can answer.

The rows of a job are deleted when it leaves the queue (`JobEdit.move`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, select

from shoal_service.core.scheduling.market import Wait
from shoal_service.fleet_views import QueuedJob, QueueView
from shoal_service.store.database import upsert
from shoal_service.store.records import PLACE_COLUMNS, place_of
from shoal_service.store.scheduling import growth, projects
from shoal_service.store.tables import jobs, queue_places
from shoal_workers.contract.job import JobState

_MAX_HOLDERS = 16
MOST_PLACED = 5_000
"""Places of one transaction: with each start and end of a job, all those behind it move."""
_SAME_START_S = 1.0
_SAME_START_SHARE = 0.02
"""An expected start that differs by less than this, relative to the time until then, is not written again."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the stored order."""

    placed: Sequence[dict[str, Any]]
    """New rows, of jobs without a place, then those that were not written for longest."""
    num_left: int
    """New rows beyond these."""
    gone: Sequence[int]
    """Numbers of the jobs that have a place no more."""


def differing(connection: Connection, waits: Sequence[Wait], *, now: float, most: int) -> Changes:
    """Compares a new order with the stored one. Jobs that are not queued are left out. `most`: new rows."""
    known = {job_id: row for job_id, *row in connection.execute(_PLACES)}
    holders: dict[tuple[str, ...], str] = {}
    placed = []
    for wait in waits:
        if (row := known.pop(wait.job_id, None)) is None:
            continue  # it has left the queue
        if (text := holders.get(wait.holders)) is None:
            text = holders[wait.holders] = json.dumps(wait.holders[:_MAX_HOLDERS])
        num, position, reason, held_by, expected_at, decided_at = row
        if (position, reason, held_by) == (wait.position, wait.reason, text) and _is_same(
            expected_at, wait.expected_at, now
        ):
            continue
        new = {
            "job_num": num,
            "position": wait.position,
            "reason": wait.reason,
            "holders": text,
            "expected_at": wait.expected_at,
            "decided_at": now,
        }
        placed.append((decided_at or 0.0, wait.position, new))
    gone = [row[0] for row in known.values() if row[1] is not None]
    gone += connection.execute(_LEFT).scalars()
    placed.sort(key=itemgetter(0, 1))
    return Changes([new for _, _, new in placed[:most]], max(0, len(placed) - most), gone)


def save(connection: Connection, changes: Changes) -> None:
    """Places of jobs that have left the queue since `differing` are not written."""
    nums = set(connection.execute(_QUEUED).scalars()) if changes.placed else set()
    placed = [row for row in changes.placed if row["job_num"] in nums]
    if changes.gone:
        gone = [{"gone": num} for num in changes.gone]
        connection.execute(delete(queue_places).where(queue_places.c.job_num == bindparam("gone")), gone)
    upsert(connection, queue_places, placed)


_QUEUED = select(jobs.c.num).where(jobs.c.state == JobState.QUEUED.value)
_LEFT = (
    select(queue_places.c.job_num)
    .join(jobs, jobs.c.num == queue_places.c.job_num)
    .where(jobs.c.state != JobState.QUEUED.value)
)
"""On PostgreSQL a job may leave the queue while its place is written."""
_PLACES = (
    select(
        *(jobs.c.id, jobs.c.num),
        *(queue_places.c.position, queue_places.c.reason, queue_places.c.holders),
        *(queue_places.c.expected_at, queue_places.c.decided_at),
    )
    .outerjoin(queue_places, queue_places.c.job_num == jobs.c.num)
    .where(jobs.c.state == JobState.QUEUED.value)
)


def read(connection: Connection, *, limit: int, visible: Collection[str] | None = None) -> QueueView:
    """The queue in its order; jobs that no pass has considered yet come last. `visible`: only jobs of these projects,
    and no ids of others."""
    query = (
        select(jobs.c.id, jobs.c.name, jobs.c.project, jobs.c.user, jobs.c.priority, jobs.c.created_at, *PLACE_COLUMNS)
        .outerjoin(queue_places, queue_places.c.job_num == jobs.c.num)
        .where(jobs.c.state == JobState.QUEUED.value)
        .order_by(queue_places.c.position.is_(None), queue_places.c.position, jobs.c.priority.desc(), jobs.c.num)
        .limit(limit)
    )
    count = select(func.count()).where(jobs.c.state == JobState.QUEUED.value)
    if visible is not None:
        query = query.where(jobs.c.project.in_(sorted(visible)))
        count = count.where(jobs.c.project.in_(sorted(visible)))
    items = tuple(_queued_job(row) for row in connection.execute(query))
    return QueueView(
        items=items if visible is None else _without_others(connection, items, visible),
        num_queued=connection.execute(count).scalar_one(),
        projects=tuple(one for one in projects.views(connection) if visible is None or one.name in visible),
        held_back=tuple(
            one for one in growth.read(connection, limit=limit) if visible is None or one.project in visible
        ),
    )


def _without_others(
    connection: Connection, items: tuple[QueuedJob, ...], visible: Collection[str]
) -> tuple[QueuedJob, ...]:
    """Without the ids of holders that are jobs of other projects."""
    named = {holder for item in items if item.place is not None for holder in item.place.holders}
    known = select(jobs.c.id).where(jobs.c.id.in_(sorted(named)), jobs.c.project.in_(sorted(visible)))
    own = set(connection.execute(known).scalars())
    found = []
    for item in items:
        if item.place is not None:
            holders = tuple(holder for holder in item.place.holders if holder in own)
            item = item.model_copy(update={"place": item.place.model_copy(update={"holders": holders})})
        found.append(item)
    return tuple(found)


def _queued_job(row: Row[*tuple[Any, ...]]) -> QueuedJob:
    return QueuedJob(
        job_id=row.id,
        name=row.name,
        project=row.project,
        user=row.user,
        priority=row.priority,
        submitted_at=row.created_at,
        place=place_of(row),
    )


def _is_same(before: float | None, after: float | None, now: float) -> bool:
    if before is None or after is None:
        return before is after
    return abs(after - before) <= max(_SAME_START_S, _SAME_START_SHARE * (after - now))
