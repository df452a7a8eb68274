"""The overview of all jobs: search, filters, order and pages in SQL, and small curves from roll-ups."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, cast, func, select
from sqlalchemy.types import JSON, Double

from shoal_service.core.goodput import Category
from shoal_service.core.selection import LabelSelector
from shoal_service.overview_views import FleetJob, NodeJob
from shoal_service.store.overview import rollups
from shoal_service.store.reads.selection import selected
from shoal_service.store.records import WAITS_FOR_CAPACITY, workers_of
from shoal_service.store.tables import job_labels, jobs, queue_places
from shoal_service.views import Goodput
from shoal_workers.contract.job import JobState

_MAX_CURVE = 32
_CATEGORIES = frozenset(category.value for category in Category)
_FROM_STATUS = (
    "reason",
    "message",
    "step",
    "total_steps",
    "eta_s",
    "loss",
    "val_loss",
    "tokens_per_s",
    "workers",
    "incidents",
    "steps_lost",
)


_COLUMNS = (
    *(
        jobs.c[name]
        for name in (
            "num",
            "id",
            "name",
            "state",
            "project",
            "user",
            "cluster",
            "priority",
            "granted_workers",
            "status",
        )
    ),
    *(jobs.c[name] for name in ("created_at", "updated_at", "started_at", "ended_at")),
    queue_places.c.position.label("queue_position"),
    queue_places.c.reason.label("waits"),
)


class JobOrder(StrEnum):
    """By what a list of jobs is ordered."""

    CREATED = "created"
    UPDATED = "updated"
    NAME = "name"
    STATE = "state"
    PROJECT = "project"
    USER = "user"
    PRIORITY = "priority"
    STEP = "step"
    LOSS = "loss"
    SPEED = "tokens_per_s"
    REMAINING = "eta_s"
    GOODPUT = "goodput"
    INCIDENTS = "incidents"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuery:
    """Which jobs, and in what order."""

    search: str = ""
    """Words, each a part of the name, the id, the project, the user or a label."""
    states: frozenset[JobState] = frozenset()
    """Empty: all."""
    project: str | None = None
    visible: frozenset[str] | None = None
    """Only jobs of these projects; None: of all."""
    labels: tuple[LabelSelector, ...] = ()
    """All of them."""
    cluster: str | None = None
    """Only jobs whose newest attempt has begun there; None: all."""
    ids: frozenset[str] = frozenset()
    """Empty: all."""
    order: JobOrder = JobOrder.CREATED
    descending: bool = True
    offset: int = 0
    limit: int = 50


def count(connection: Connection, query: FleetQuery) -> int:
    found = connection.execute(_filtered(select(func.count()).select_from(jobs), query)).scalar_one()
    return int(found)


def num_by_state(connection: Connection, visible: Collection[str] | None = None) -> dict[JobState, int]:
    query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
    rows = connection.execute(_visible(query, visible))
    return {JobState(state): number for state, number in rows}


def page(connection: Connection, query: FleetQuery) -> tuple[FleetJob, ...]:
    """Values that a job does not have come last, in both directions."""
    rows_of = _filtered(select(*_COLUMNS), query).outerjoin(queue_places, queue_places.c.job_num == jobs.c.num)
    by = _ordered_by(connection, query.order)
    direction = by.desc() if query.descending else by.asc()
    newest = jobs.c.num.desc() if query.descending else jobs.c.num.asc()
    ordered = rows_of.order_by(direction.nulls_last(), newest)
    rows = connection.execute(ordered.offset(query.offset).limit(query.limit)).all()
    labels = _labels(connection, [row.num for row in rows])
    return tuple(_job(connection, row, labels[row.num]) for row in rows)


def accounts(connection: Connection, visible: Collection[str] | None = None) -> Goodput | None:
    """The sum over all jobs that are queued or hold workers; None: there is none."""
    holding = [state.value for state in JobState if state.holds_workers or state is JobState.QUEUED]
    documents = connection.execute(_visible(select(jobs.c.status).where(jobs.c.state.in_(holding)), visible)).scalars()
    seconds: dict[Category, float] = defaultdict(float)
    total, found = 0.0, False
    for document in documents:
        goodput = _document(document).get("goodput") or {}
        total += goodput.get("total", 0.0)
        for name, amount in goodput.get("seconds", {}).items():
            if name in _CATEGORIES:
                seconds[Category(name)] += amount
        found = True
    if not found:
        return None
    ratio = seconds[Category.PRODUCTIVE] / total if total else None
    return Goodput(seconds={name: amount for name, amount in seconds.items() if amount}, total=total, ratio=ratio)


def jobs_by_node(connection: Connection, visible: Collection[str] | None = None) -> dict[str, tuple[NodeJob, ...]]:
    """What runs on each node, by node id."""
    holding = [state.value for state in JobState if state.holds_workers]
    found: dict[str, list[NodeJob]] = defaultdict(list)
    query = select(jobs.c.id, jobs.c.name, jobs.c.workers).where(jobs.c.state.in_(holding)).order_by(jobs.c.num)
    for row in connection.execute(_visible(query, visible)):
        by_node = defaultdict(list)
        for worker in workers_of(row.workers):
            by_node[worker.node_id].append(worker.rank)
        for node_id, ranks in by_node.items():
            known = tuple(sorted(rank for rank in ranks if rank is not None))
            found[node_id].append(NodeJob(job_id=row.id, name=row.name, ranks=known, num_workers=len(ranks)))
    return {node_id: tuple(on_node) for node_id, on_node in found.items()}


def _visible(query: Select[Any], visible: Collection[str] | None) -> Select[Any]:
    return query if visible is None else query.where(jobs.c.project.in_(sorted(visible)))


def _filtered(select_jobs: Select[Any], query: FleetQuery) -> Select[Any]:
    if query.states:
        select_jobs = select_jobs.where(jobs.c.state.in_(sorted(state.value for state in query.states)))
    if query.ids:
        select_jobs = select_jobs.where(jobs.c.id.in_(sorted(query.ids)))
    if query.project is not None:
        select_jobs = select_jobs.where(jobs.c.project == query.project)
    if query.cluster is not None:
        select_jobs = select_jobs.where(jobs.c.cluster == query.cluster)
    if query.visible is not None:
        select_jobs = select_jobs.where(jobs.c.project.in_(sorted(query.visible)))
    return selected(select_jobs, query.labels, query.search)


def _ordered_by(connection: Connection, order: JobOrder) -> ColumnElement[Any]:
    match order:
        case JobOrder.CREATED:
            return jobs.c.num
        case JobOrder.UPDATED:
            return jobs.c.updated_at
        case JobOrder.NAME | JobOrder.STATE | JobOrder.PROJECT | JobOrder.USER | JobOrder.PRIORITY:
            return jobs.c[order.value]
        case JobOrder.GOODPUT:
            return _number(connection, "goodput", "ratio")
        case _:
            return _number(connection, order.value)


def _number(connection: Connection, *path: str) -> ColumnElement[Any]:
    """A number of the status document."""
    if connection.dialect.name == "sqlite":
        return func.json_extract(jobs.c.status, "$." + ".".join(path))
    return cast(func.json_extract_path_text(cast(jobs.c.status, JSON), *path), Double)


def _labels(connection: Connection, nums: Sequence[int]) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    query = select(job_labels).where(job_labels.c.job_num.in_(nums)).order_by(job_labels.c.job_num, job_labels.c.key)
    for row in connection.execute(query):
        found[row.job_num][row.key] = row.value
    return found


def _job(connection: Connection, row: Row[Any], labels: dict[str, str]) -> FleetJob:
    status = _document(row.status)
    known = {key: status[key] for key in _FROM_STATUS if status.get(key) is not None}
    if row.queue_position is not None:
        known |= {"reason": WAITS_FOR_CAPACITY, "message": row.waits}
    elif status.get("note"):
        known["message"] = " ".join(part for part in (known.get("message", ""), status["note"]) if part)
    curve = rollups.read(connection, row.num, after_step=-1, until_step=None, max_points=_MAX_CURVE)
    return FleetJob(
        id=row.id,
        name=row.name,
        state=JobState(row.state),
        project=row.project,
        user=row.user,
        cluster=row.cluster,
        priority=row.priority,
        labels=labels,
        queue_position=row.queue_position,
        desired_workers=row.granted_workers,
        goodput=(status.get("goodput") or {}).get("ratio"),
        created_at=row.created_at,
        updated_at=row.updated_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        losses=tuple(float(f"{point.loss:.4g}") if math.isfinite(point.loss) else None for point in curve),
        world_sizes=tuple(point.world_size for point in curve),
        **known,
    )


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
