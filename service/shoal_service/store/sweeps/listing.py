"""Sweeps as the API shows them: the list of all, and one with its jobs. Functions of an open transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, func, select, tuple_

from shoal_service.core.selection import LabelSelector
from shoal_service.core.sweeps.grid import MAX_JOBS
from shoal_service.core.sweeps.pruning import rank
from shoal_service.overview_views import SweepSummary, SweepView
from shoal_service.store.errors import SweepNotFound
from shoal_service.store.overview import fleet
from shoal_service.store.reads import cursor as page_cursors
from shoal_service.store.records import load_spec
from shoal_service.store.tables import job_labels, jobs
from shoal_service.views import Page
from shoal_workers.contract.course.sweep import SWEEP_LABEL
from shoal_workers.contract.job import JobState


@dataclass(frozen=True, slots=True)
class Which:
    """Which sweeps a list holds; None: all."""

    project: str | None = None
    name: str | None = None
    visible: Collection[str] | None = None


def page(connection: Connection, which: Which, *, limit: int, cursor: str | None) -> Page[SweepSummary]:
    """The newest first, by their first jobs. Raises InvalidCursor."""
    first = func.min(jobs.c.num)
    query = _members(first.label("first"), func.min(jobs.c.created_at).label("created_at"))
    if which.project is not None:
        query = query.where(jobs.c.project == which.project)
    if which.name is not None:
        query = query.where(job_labels.c.value == which.name)
    if which.visible is not None:
        query = query.where(jobs.c.project.in_(sorted(which.visible)))
    query = query.group_by(jobs.c.project, job_labels.c.value)
    if cursor is not None:
        query = query.having(first < page_cursors.decode(cursor))
    rows = connection.execute(query.order_by(first.desc()).limit(limit + 1)).all()
    shown = rows[:limit]
    states = _num_by_state(connection, [(row.project, row.value) for row in shown])
    items = tuple(
        SweepSummary(
            name=row.value,
            project=row.project,
            num_jobs=states[row.project, row.value].total(),
            num_by_state=dict(states[row.project, row.value]),
            created_at=row.created_at,
        )
        for row in shown
    )
    return Page[SweepSummary](
        items=items, next_cursor=page_cursors.encode(shown[-1].first) if len(rows) > limit else None
    )


def view(connection: Connection, project: str, name: str, order: Sequence[str] = ()) -> SweepView:
    """Its jobs, the best first; `order`: only those with these ids, in this order. Raises SweepNotFound."""
    found = page(connection, Which(project, name), limit=1, cursor=None).items
    if not found:
        raise SweepNotFound(project, name)
    query = fleet.FleetQuery(
        project=project,
        labels=(LabelSelector(SWEEP_LABEL, name),),
        ids=frozenset(order),
        descending=False,
        limit=MAX_JOBS,
    )
    items = fleet.page(connection, query)
    if order:
        place = {job_id: number for number, job_id in enumerate(order)}
        items = tuple(sorted(items, key=lambda job: place[job.id]))
    else:
        items = tuple(sorted(items, key=lambda job: rank(job.val_loss, job.loss)))
    newest = _members(jobs.c.num, jobs.c.spec_version).where(jobs.c.project == project, job_labels.c.value == name)
    last = connection.execute(newest.order_by(jobs.c.num.desc()).limit(1)).one()
    rules = load_spec(connection, last.num, last.spec_version).sweep
    return SweepView(
        **dict(found[0]),
        limit=rules.limit if rules is not None else None,
        prune=rules.prune if rules is not None else None,
        warmup_steps=rules.warmup_steps if rules is not None else None,
        jobs=items,
    )


def _num_by_state(
    connection: Connection, sweeps: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Counter[JobState]]:
    found: dict[tuple[str, str], Counter[JobState]] = {sweep: Counter() for sweep in sweeps}
    if not found:
        return found
    query = _members(jobs.c.state, func.count().label("number"))
    query = query.where(tuple_(jobs.c.project, job_labels.c.value).in_(list(found)))
    for row in connection.execute(query.group_by(jobs.c.project, job_labels.c.value, jobs.c.state)):
        found[row.project, row.value][JobState(row.state)] = row.number
    return found


def _members(*columns: Any) -> Select[Any]:
    """Query for the jobs of all sweeps: project, name of the sweep (`value`), and these columns."""
    return (
        select(jobs.c.project, job_labels.c.value, *columns)
        .join(job_labels, job_labels.c.job_num == jobs.c.num)
        .where(job_labels.c.key == SWEEP_LABEL)
    )
