"""Lists of jobs in SQL: selected by state, project, labels, words and conditions, ordered and cut into pages.

`page` is the list of the API, with cursors that are opaque to clients and checked when one comes back. `fleet_page` is
the list of the overview, in any order, with a small curve of each job; `plain_fleet_page` has no curves. A file of jobs
takes `nums`, and then `summaries` of some of them at a time.

What the table of jobs offers: the names that its conditions and columns can use, and views saved under a name.

Names of facts and settings are those of `core/where`. Names of labels and metrics are read from jobs, so that nobody
sees a name of a project that is hidden from them. A view is a document of texts, which are parsed when it is used: one
with a name that a later release does not know is still shown, with the mistake. Called by the HTTP edge.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, delete, func, or_, select, union_all

from shoal_service.core.downsampling import bucket_steps
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.where.fields import FACTS, Field, Source, setting_kinds
from shoal_service.core.where.language import LabelSelector, Selection, search_words
from shoal_service.fleet_views import ClusterGoodput, FleetJob, JobField, NodeJob, SavedView, TableView
from shoal_service.store import curves
from shoal_service.store.database import (
    Transaction,
    in_projects,
    in_states,
    job_labels,
    job_views,
    jobs,
    json_number,
    queue_places,
    upsert,
)
from shoal_service.store.errors import InvalidCursor, TooManyViews, ViewNotFound
from shoal_service.store.job_conditions import condition_in_sql, order_in_sql, read_labels, read_values
from shoal_service.store.records import (
    SUMMARY_COLUMNS,
    listed_job,
    parse_fields,
    parse_workers,
    read_document,
)
from shoal_service.views import JobSummary, Page
from shoal_workers.contract import JobState

_PLAIN = re.compile(rb"(jobs|sorted):([0-9]{1,18})")
"""What a cursor holds: the number of the last job of the page before; of a list with an order, how many jobs came
before."""
_SEARCHED = (jobs.c.name, jobs.c.id, jobs.c.project, jobs.c.user)
_MAX_CURVE = 32
"""Number of points of the small curve of a job."""
_CATEGORIES = frozenset(category.value for category in Category)
_WAITS = select(queue_places.c.reason).where(queue_places.c.job_num == jobs.c.num).correlate(jobs).scalar_subquery()
_FLEET_COLUMNS = (*SUMMARY_COLUMNS, jobs.c.started_at, jobs.c.ended_at, _WAITS.label("waits"))
_JobPage = Page[JobSummary]
_ALL = Selection()
_USUAL_LIMIT = 50


class JobOrder(StrEnum):
    """What a list of jobs is ordered by: facts by name."""

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
    """Selects jobs, and their order."""

    search: str = ""
    """Words, each a part of the name, the id, the project, the user or a label."""
    states: frozenset[JobState] = frozenset()
    """Empty: all."""
    project: str | None = None
    user: str | None = None
    visible: frozenset[str] | None = None
    """Only jobs of these projects; None means all."""
    labels: tuple[LabelSelector, ...] = ()
    """All of them."""
    cluster: str | None = None
    """Only jobs whose newest attempt has begun there; None means all."""
    ids: frozenset[str] = frozenset()
    """Empty: all."""
    selection: Selection = _ALL
    order: JobOrder = JobOrder.CREATED
    """Used if the selection has no order."""
    descending: bool = True
    offset: int = 0
    limit: int | None = _USUAL_LIMIT
    """None means all."""


_EVERY_JOB = FleetQuery()


def page(tx: Transaction, query: FleetQuery = _EVERY_JOB, cursor: str | None = None) -> Page[JobSummary]:
    """Return a page of jobs, newest first if the selection has no order: `order` and `offset` are not for this list.

    Pages of a list with an order are cut by counting, so a job that changes its place meanwhile may be on two pages or
    on none. Raises InvalidCursor.

    Args:
        cursor: `next_cursor` of the page before.
    """
    is_sorted, limit = bool(query.selection.order), query.limit or _USUAL_LIMIT
    after = None if cursor is None else decode_cursor(cursor, is_sorted=is_sorted)
    one_more = select(*SUMMARY_COLUMNS).limit(limit + 1)
    if is_sorted:
        ordered = one_more.order_by(*order_in_sql(tx, query.selection.order), jobs.c.num.desc()).offset(after or 0)
        filtered = _filter(tx, ordered, query)
    else:
        ordered = one_more.order_by(jobs.c.num.desc())
        earlier = ordered if after is None else ordered.where(jobs.c.num < after)
        filtered = _filter(tx, earlier, replace(query, states=frozenset()))
    if query.states and not is_sorted:  # an index range per state: a rare state is found without a scan
        ranges = [filtered.where(jobs.c.state == state.value).subquery() for state in sorted(query.states)]
        merged = union_all(*(select(part) for part in ranges)).subquery()
        filtered = select(merged).order_by(merged.c.num.desc()).limit(limit + 1)
    rows = tx.execute(filtered).all()
    items = _make_summaries(tx, rows[:limit], query.selection.columns)
    if len(rows) <= limit:
        return _JobPage(items=items)
    reached = (after or 0) + limit if is_sorted else rows[limit - 1].num
    return _JobPage(items=items, next_cursor=encode_cursor(reached, is_sorted=is_sorted))


def fleet(tx: Transaction, query: FleetQuery) -> tuple[tuple[FleetJob, ...], int]:
    """A page of jobs, and the number of jobs that match."""
    return fleet_page(tx, query), count_fleet(tx, query)


def fleet_accounts(
    tx: Transaction, visible: Collection[str] | None = None
) -> tuple[dict[JobState, int], tuple[ClusterGoodput, ...], Goodput | None]:
    """Jobs by state, the cluster's goodput of the last day, and the sum of the accounts of today's jobs. `visible`:
    only jobs of these projects, and nothing about the whole cluster."""
    of_cluster = curves.cluster_goodput(tx) if visible is None else ()
    return _num_by_state(tx, visible), of_cluster, _sum_accounts(tx, visible)


def count_fleet(tx: Transaction, query: FleetQuery) -> int:
    """The number of jobs that match, on all pages."""
    counted = tx.execute(_filter(tx, select(func.count()).select_from(jobs), query)).scalar_one()
    return int(counted)


def _num_by_state(tx: Transaction, visible: Collection[str] | None = None) -> dict[JobState, int]:
    query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
    rows = tx.execute(query.where(in_projects(jobs.c.project, visible)))
    return {JobState(state): number for state, number in rows}


def fleet_page(tx: Transaction, query: FleetQuery) -> tuple[FleetJob, ...]:
    """A page of jobs. Values that a job does not have come last, in both directions."""
    return tuple(_with_curve(tx, num, job) for num, job in plain_fleet_page(tx, query).items())


def plain_fleet_page(tx: Transaction, query: FleetQuery) -> dict[int, FleetJob]:
    """The same page without small curves, by the number of the job."""
    rows = tx.execute(_cut_page(tx, _filter(tx, select(*_FLEET_COLUMNS), query), query)).all()
    page_nums = [row.num for row in rows]
    labels, values = read_labels(tx, page_nums), read_values(tx, page_nums, query.selection.columns)
    return {row.num: _fleet_job(row, labels[row.num], values[row.num]) for row in rows}


def nums(tx: Transaction, query: FleetQuery) -> array[int]:
    """The numbers of the jobs that match, in the order of the query: 8 bytes for each job."""
    return array("q", tx.execute(_cut_page(tx, _filter(tx, select(jobs.c.num), query), query)).scalars())


def summaries(tx: Transaction, nums: Sequence[int], columns: Sequence[Field] = ()) -> tuple[JobSummary, ...]:
    """The jobs with these numbers, in this order, with the values of the columns. Deleted ones are left out."""
    rows = {row.num: row for row in tx.execute(select(*SUMMARY_COLUMNS).where(jobs.c.num.in_(nums)))}
    return _make_summaries(tx, [rows[num] for num in nums if num in rows], columns)


def _make_summaries(
    tx: Transaction, rows: Sequence[Row[*tuple[Any, ...]]], columns: Sequence[Field]
) -> tuple[JobSummary, ...]:
    """Return the jobs of rows of SUMMARY_COLUMNS, with the values of the columns."""
    values = read_values(tx, [row.num for row in rows], columns)
    return tuple(listed_job(JobSummary, row, parse_fields(row.status), values=values[row.num]) for row in rows)


def _sum_accounts(tx: Transaction, visible: Collection[str] | None = None) -> Goodput | None:
    """The sum over all jobs that are queued or hold workers; None if there are no such jobs."""
    in_state = select(jobs.c.status).where(
        in_states(state for state in JobState if state.holds_workers or state is JobState.QUEUED),
        in_projects(jobs.c.project, visible),
    )
    documents = tx.execute(in_state).scalars().all()
    if not documents:
        return None
    seconds: dict[Category, float] = defaultdict(float)
    total = 0.0
    for document in documents:
        goodput = parse_fields(document).get("goodput") or {}
        total += goodput.get("total", 0.0)
        for name, amount in goodput.get("seconds", {}).items():
            if name in _CATEGORIES:
                seconds[Category(name)] += amount
    ratio = seconds[Category.PRODUCTIVE] / total if total else None
    return Goodput(seconds={name: amount for name, amount in seconds.items() if amount}, total=total, ratio=ratio)


def jobs_by_node(tx: Transaction, visible: Collection[str] | None = None) -> dict[str, tuple[NodeJob, ...]]:
    """The jobs that run on each node, by node id."""
    jobs_by_id: dict[str, list[NodeJob]] = defaultdict(list)
    query = (
        select(jobs.c.id, jobs.c.name, jobs.c.workers)
        .where(in_states(state for state in JobState if state.holds_workers))
        .order_by(jobs.c.num)
    )
    for row in tx.execute(query.where(in_projects(jobs.c.project, visible))):
        by_node = defaultdict(list)
        for worker in parse_workers(row.workers):
            by_node[worker.node_id].append(worker.rank)
        for node_id, ranks in by_node.items():
            known = tuple(sorted(rank for rank in ranks if rank is not None))
            jobs_by_id[node_id].append(NodeJob(job_id=row.id, name=row.name, ranks=known, num_workers=len(ranks)))
    return {node_id: tuple(on_node) for node_id, on_node in jobs_by_id.items()}


def _filter(tx: Transaction, select_jobs: Select[Any], query: FleetQuery) -> Select[Any]:
    if query.states:
        select_jobs = select_jobs.where(in_states(query.states))
    if query.ids:
        select_jobs = select_jobs.where(jobs.c.id.in_(sorted(query.ids)))
    for column, value in ((jobs.c.project, query.project), (jobs.c.user, query.user), (jobs.c.cluster, query.cluster)):
        if value is not None:
            select_jobs = select_jobs.where(column == value)
    select_jobs = select_jobs.where(in_projects(jobs.c.project, query.visible))
    return _apply_selection(tx, selected(select_jobs, query.labels, query.search), query.selection)


def _cut_page(tx: Transaction, select_jobs: Select[Any], query: FleetQuery) -> Select[Any]:
    """Orders the jobs, and cuts the page out."""
    if query.selection.order:
        ordered = select_jobs.order_by(*order_in_sql(tx, query.selection.order), jobs.c.num.desc())
    else:
        by, newest = _choose_order(tx, query.order), jobs.c.num.desc() if query.descending else jobs.c.num.asc()
        ordered = select_jobs.order_by((by.desc() if query.descending else by.asc()).nulls_last(), newest)
    return ordered.offset(query.offset).limit(query.limit)


def _choose_order(tx: Transaction, order: JobOrder) -> ColumnElement[Any]:
    if order is JobOrder.CREATED:
        return jobs.c.num  # it rises with the time of the submission
    fact = FACTS[order.value]
    is_column = fact.source is Source.COLUMN
    return jobs.c[fact.path[0]] if is_column else json_number(tx, jobs.c.status, *fact.path)


def _apply_selection(tx: Transaction, query: Select[Any], selection: Selection) -> Select[Any]:
    if selection.hides_archived:
        query = query.where(jobs.c.archived_at.is_(None))
    return query if selection.where is None else query.where(condition_in_sql(tx, selection.where))


def _fleet_job(row: Row[Any], labels: dict[str, str], values: dict[str, Any]) -> FleetJob:
    status = parse_fields(row.status)
    messages = (row.waits,) if row.queue_position is not None else (status.get("message"), status.get("note"))
    message = " ".join(filter(None, messages))
    return listed_job(FleetJob, row, status, message=message, labels=labels, values=values)


def _with_curve(tx: Transaction, num: int, job: FleetJob) -> FleetJob:
    points = curves.read_points(tx, num, ("loss", "world_size"), min_points=_MAX_CURVE, last_step=job.step)
    if not points:
        return job
    first = points[0].step
    width = bucket_steps(first, points[-1].step, _MAX_CURVE)
    parts = [list(part) for _, part in groupby(points, lambda point: (point.step - first) // width)]
    losses = tuple(_mean_loss([point.loss for point in part]) for part in parts)
    return job.model_copy(update={"losses": losses, "world_sizes": tuple(part[-1].world_size for part in parts)})


def _mean_loss(losses: Sequence[float | None]) -> float | None:
    """To four digits; None if one of them is not finite, so that this stays visible."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return float(f"{math.fsum(known) / len(known):.4g}") if len(known) == len(losses) else None


def encode_cursor(num: int, *, is_sorted: bool = False) -> str:
    """Makes the cursor of the page after job `num`, or after that many jobs of a list with an order."""
    return base64.urlsafe_b64encode(b"%s:%d" % (b"sorted" if is_sorted else b"jobs", num)).decode().rstrip("=")


def decode_cursor(cursor: str, *, is_sorted: bool = False) -> int:
    """Reads a cursor. Raises InvalidCursor: `encode_cursor` did not make it."""
    try:
        plain = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidCursor(cursor) from error
    match = _PLAIN.fullmatch(plain)
    if match is None or (match.group(1) == b"sorted") is not is_sorted:
        raise InvalidCursor(cursor)
    return int(match.group(2))


def selected(query: Select[Any], labels: Collection[LabelSelector], search: str) -> Select[Any]:
    """Selects only the jobs that all of `labels` match, and that have every word of `search`."""
    for label in labels:
        with_label = select(job_labels.c.job_num).where(job_labels.c.key == label.name)
        if label.value is not None:
            with_label = with_label.where(job_labels.c.value == label.value)
        matching = jobs.c.num.in_(with_label)
        query = query.where(~matching if label.negated else matching)
    for word in search_words(search):
        places = [column.icontains(word, autoescape=True) for column in _SEARCHED]
        query = query.where(or_(*places, jobs.c.num.in_(_with_word(word))))
    return query


def _with_word(word: str) -> Select[Any]:
    """Selects the numbers of the jobs with a label whose name or value holds the word; NAME=VALUE is one label."""
    name, equals, value = word.partition("=")
    columns = (job_labels.c.key, job_labels.c.value)
    anywhere = or_(*(column.icontains(word, autoescape=True) for column in columns))
    if equals and name:
        anywhere = or_(anywhere, (job_labels.c.key == name) & job_labels.c.value.icontains(value, autoescape=True))
    return select(job_labels.c.job_num).where(anywhere)


MAX_VIEWS = 200
"""Views of a project, at most."""
_NEWEST = 200
"""Jobs whose metrics are offered."""
_MOST_LABELS = 200


def known_fields(tx: Transaction, visible: Collection[str] | None) -> tuple[JobField, ...]:
    """The names, facts first. `visible`: labels and metrics of jobs of these projects; None means all."""
    facts = [JobField(name=fact.name, kind=fact.kind, meaning=fact.meaning) for fact in FACTS.values()]
    settings = [
        JobField(name=".".join(path), kind=kind) for path, kind in setting_kinds().items() if path[0] not in FACTS
    ]
    keys = select(job_labels.c.key).join(jobs, jobs.c.num == job_labels.c.job_num).distinct()
    labels = tx.execute(
        keys.where(in_projects(jobs.c.project, visible)).order_by(job_labels.c.key).limit(_MOST_LABELS)
    ).scalars()
    metrics: dict[str, dict[str, Any]] = {"metric": {}, "val": {}}
    newest = (
        select(jobs.c.status).where(in_projects(jobs.c.project, visible)).order_by(jobs.c.num.desc()).limit(_NEWEST)
    )
    for document in tx.execute(newest).scalars():
        status = parse_fields(document)
        metrics["metric"] |= status.get("metrics") or {}
        metrics["val"] |= status.get("val_metrics") or {}
    return (
        *facts,
        *(
            JobField(name=f"{family}.{quoted(name)}", kind="number")
            for family in metrics
            for name in sorted(metrics[family])
            if name and '"' not in name and "\\" not in name
        ),
        *(JobField(name=f"label.{name}", kind="label") for name in labels),
        *settings,
    )


def quoted(name: str) -> str:
    """A name that a user has chosen, as the language writes it."""
    plain = all(letter.isascii() and (letter.isalnum() or letter in "_/-.") for letter in name)
    return name if plain and name[-1:].isalnum() and name[:1].isalnum() and ".." not in name else f'"{name}"'


def read_views(tx: Transaction, visible: Collection[str] | None, project: str | None = None) -> list[SavedView]:
    """The saved views by project and name; `project`: of it alone."""
    of_projects = select(job_views).where(in_projects(job_views.c.project, visible, project))
    query = of_projects.order_by(job_views.c.project, job_views.c.name)
    return [
        SavedView(
            project=row.project,
            name=row.name,
            view=read_document(TableView, row.document, TableView()).value,
            saved_at=row.saved_at,
            saved_by=row.saved_by,
        )
        for row in tx.execute(query)
    ]


def put_view(tx: Transaction, project: str, name: str, view: TableView, *, by: str, now: float) -> SavedView:
    """Saves a view, instead of one with the same name. Raises TooManyViews."""
    saved = SavedView(project=project, name=name, view=view, saved_at=now, saved_by=by)
    row = {"project": project, "name": name, "document": view.model_dump_json(), "saved_at": now, "saved_by": by[:200]}
    upsert(tx, job_views, [row])
    counted = select(func.count()).select_from(job_views).where(job_views.c.project == project)
    if tx.execute(counted).scalar_one() > MAX_VIEWS:
        raise TooManyViews(project, MAX_VIEWS)
    return saved


def remove_view(tx: Transaction, project: str, name: str) -> None:
    """Raises ViewNotFound."""
    if not tx.execute(delete(job_views).where(job_views.c.project == project, job_views.c.name == name)).rowcount:
        raise ViewNotFound(project, name)
