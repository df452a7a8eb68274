"""Sweeps: submits and cancels their jobs together, lists them, compares their jobs, and ends the worse ones.

    create, cancel           all jobs of a sweep, or none
    read_page, read_sweep    the list of sweeps, and one with its jobs, the best first
    find_worse, prune        a comparison reads a few rows of each job, by primary keys
    read_curves              one query: the steps themselves while there are few, otherwise the roll-ups of the finest
                             level of which all jobs together have few enough rows

`core/sweeps.py` decides which job ends, and which is the best so far.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Select, Table, func, select, tuple_

from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import CHUNK
from shoal_service.core.events import JobOutperformed, JobRequested
from shoal_service.core.events.catalogue import describe
from shoal_service.core.job_machine import ACTIVE, Requested, step
from shoal_service.core.sweeps import (
    AVERAGED_STEPS,
    MAX_JOBS,
    Measure,
    Rule,
    Verdict,
    best_so_far,
    rank,
    step_to_compare,
    verdict,
)
from shoal_service.core.where.language import LabelSelector
from shoal_service.fleet_views import SweepBest, SweepCurve, SweepCurves, SweepResult, SweepSummary, SweepView
from shoal_service.store import access, job_lists, submissions
from shoal_service.store.curves import WIDTHS, rolled_until
from shoal_service.store.database import (
    Transaction,
    events,
    in_projects,
    job_labels,
    jobs,
    json_number,
    series,
    series_rollups,
)
from shoal_service.store.edit import edit_job
from shoal_service.store.errors import (
    IdempotencyConflict,
    JobEnded,
    QueueFull,
    SweepConflict,
    SweepNotFound,
    SweepTooLarge,
)
from shoal_service.store.records import load_spec
from shoal_service.views import Page
from shoal_workers.contract import SWEEP_LABEL, JobSpec, JobState

PRUNED = "pruned"
"""Reason of a job that was ended because others of its sweep are better."""


MAX_COMPARED = 500
"""Number of jobs of a sweep that are compared, the newest ones."""


def create(tx: Transaction, name: str, jobs: Sequence[tuple[JobSpec, str]], *, now: float) -> tuple[list[str], bool]:
    """Creates all jobs of a sweep, or none. Returns their ids in this order, and whether one is new.

    `jobs`: their specs, all of one project, and the notes of their statuses. A job has a key of project, sweep and
    number. Raises SweepConflict, SweepTooLarge; SpecError, as `submissions.create`.
    """
    ids, is_new = [], False
    first_island: str | None = None
    for number, (spec, note) in enumerate(jobs, 1):
        if spec.islands is not None and spec.islands.index and spec.islands.run is None:
            spec = spec.model_copy(update={"islands": spec.islands.model_copy(update={"run": first_island})})
        key = f"sweep/{spec.project}/{name}/{number}"
        try:
            view, created = submissions.create(tx, spec, idempotency_key=key, now=now, note=note)
        except IdempotencyConflict as error:
            raise SweepConflict(spec.project, name, number, error.job_id) from None
        except QueueFull as error:
            raise SweepTooLarge(error.name, error.queued, error.max_queued, error.is_user) from None
        ids.append(view.id)
        if spec.islands is not None and spec.islands.index == 0:
            first_island = view.id
        is_new = is_new or created
    access.note_created(path=f"/v1/sweeps/{jobs[0][0].project}/{name}")
    return ids, is_new


def cancel(tx: Transaction, project: str, name: str, *, now: float) -> list[str]:
    """Ends those of its jobs that have not ended, and returns their ids. Raises SweepNotFound."""
    cancelled = []
    for job_id in reversed(_find_jobs(tx, project, name, limit=None)):
        try:
            changed = submissions.requested(tx, job_id, Desired.CANCEL, now=now)
        except JobEnded:
            continue
        if changed:
            cancelled.append(job_id)
    return cancelled


def read_page(
    tx: Transaction,
    *,
    project: str | None = None,
    name: str | None = None,
    visible: Collection[str] | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> Page[SweepSummary]:
    """Read the list of sweeps, the newest first, by their first jobs. None means all. Raises InvalidCursor."""
    first = func.min(jobs.c.num)
    query = _select_members(
        first.label("first"),
        func.min(jobs.c.created_at).label("created_at"),
        func.max(jobs.c.ended_at).label("ended_at"),
        func.count(jobs.c.ended_at).label("num_ended"),
        func.count().label("num_jobs"),
    ).where(in_projects(jobs.c.project, visible, project))
    if name is not None:
        query = query.where(job_labels.c.value == name)
    query = query.group_by(jobs.c.project, job_labels.c.value)
    if cursor is not None:
        query = query.having(first < job_lists.decode_cursor(cursor))
    rows = tx.execute(query.order_by(first.desc()).limit(limit + 1)).all()
    shown = rows[:limit]
    sweeps = [(row.project, row.value) for row in shown]
    states, best = _count_by_state(tx, sweeps), _find_best(tx, sweeps)
    items = tuple(
        SweepSummary(
            name=row.value,
            project=row.project,
            num_jobs=states[row.project, row.value].total(),
            num_by_state=dict(states[row.project, row.value]),
            created_at=row.created_at,
            ended_at=row.ended_at if row.num_ended == row.num_jobs else None,
            best=best.get((row.project, row.value)),
        )
        for row in shown
    )
    return Page[SweepSummary](
        items=items, next_cursor=job_lists.encode_cursor(shown[-1].first) if len(rows) > limit else None
    )


def read_sweep(tx: Transaction, project: str, name: str, order: Sequence[str] = ()) -> SweepView:
    """Read a sweep with its jobs, the best first. Raises SweepNotFound.

    Args:
        order: only the jobs with these ids, in this order.
    """
    sweeps = read_page(tx, project=project, name=name, limit=1).items
    if not sweeps:
        raise SweepNotFound(project, name)
    query = job_lists.FleetQuery(
        project=project,
        labels=(LabelSelector(SWEEP_LABEL, name),),
        ids=frozenset(order),
        descending=False,
        limit=MAX_JOBS,
    )
    items = job_lists.fleet_page(tx, query)
    if order:
        place = {job_id: number for number, job_id in enumerate(order)}
        items = tuple(sorted(items, key=lambda job: place[job.id]))
    else:
        items = tuple(sorted(items, key=lambda job: rank(job.val_loss, job.loss)))
    newest = _select_members(jobs.c.num, jobs.c.spec_version).where(
        jobs.c.project == project, job_labels.c.value == name
    )
    last = tx.execute(newest.order_by(jobs.c.num.desc()).limit(1)).one()
    rules = load_spec(tx, last.num, last.spec_version).sweep
    return SweepView(
        **dict(sweeps[0]),
        limit=rules.limit if rules is not None else None,
        prune=rules.prune if rules is not None else None,
        warmup_steps=rules.warmup_steps if rules is not None else None,
        reduction=rules.reduction if rules is not None and rules.prune == "halving" else None,
        jobs=items,
    )


def find_worse(tx: Transaction, project: str, sweep: str, rules: dict[str, Rule]) -> dict[str, Verdict]:
    """Find which of these jobs of a sweep are worse than the others, by their ids. Raises SweepNotFound."""
    verdicts: dict[str, Verdict] = {}
    nums = _find_jobs(tx, project, sweep)
    for measure in {rule.measure for rule in rules.values()}:
        reached = _read_reached(tx, nums, measure)
        values: dict[int, dict[str, float]] = {}
        for job_id, rule in rules.items():
            at = step_to_compare(job_id, reached, rule) if rule.measure is measure else None
            if at is None:
                continue
            if at not in values:
                values[at] = _read_values(tx, nums, at, measure)
            if worse := verdict(job_id, at, values[at], rule):
                verdicts[job_id] = worse
    return verdicts


def prune(tx: Transaction, job_id: str, sweep: str, worse: Verdict, rule: Rule, *, now: float) -> bool:
    """Ends a job that others of its sweep outperform. False: it has ended, or a user has asked for something else.
    Raises JobNotFound."""
    with edit_job(tx, job_id, now, is_request=True) as edit:
        before, after = edit.standing, step(edit.standing, Requested(Desired.CANCEL))
        if before.state not in ACTIVE or before.desired is not Desired.RUN or after is None:
            return False
        event = JobOutperformed(
            sweep=sweep,
            measure=rule.measure.value,
            step=worse.step,
            value=_finite_or_none(worse.value),
            median=_finite_or_none(worse.median),
            num_others=worse.num_others,
            num_kept=worse.num_kept,
        )
        edit.event(event)
        edit.move(after, PRUNED, event.describe())
    return True


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def explain_pruning(tx: Transaction, job_num: int) -> str:
    """Return why the job was asked to end; empty if a user asked."""
    asked = (JobOutperformed.type, JobRequested.type)
    query = select(events.c.type, events.c.data).where(events.c.job_num == job_num, events.c.type.in_(asked))
    newest = tx.execute(query.order_by(events.c.seq.desc()).limit(1)).one_or_none()
    if newest is None or newest.type != JobOutperformed.type:
        return ""
    return describe(newest.type, json.loads(newest.data)).message


def _count_by_state(tx: Transaction, sweeps: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Counter[JobState]]:
    counts: dict[tuple[str, str], Counter[JobState]] = {sweep: Counter() for sweep in sweeps}
    if not counts:
        return counts
    query = _select_members(jobs.c.state, func.count().label("number"))
    query = query.where(tuple_(jobs.c.project, job_labels.c.value).in_(list(counts)))
    for row in tx.execute(query.group_by(jobs.c.project, job_labels.c.value, jobs.c.state)):
        counts[row.project, row.value][JobState(row.state)] = row.number
    return counts


def _find_best(tx: Transaction, sweeps: Sequence[tuple[str, str]]) -> dict[tuple[str, str], SweepResult]:
    """The best job of each of these sweeps, by the same key as `rank`: only one row of each leaves the database."""
    if not sweeps:
        return {}
    val_loss, loss = (json_number(tx, jobs.c.status, name) for name in ("val_loss", "loss"))
    value = func.coalesce(val_loss, loss)
    place = func.row_number().over(partition_by=(jobs.c.project, job_labels.c.value), order_by=(value, jobs.c.num))
    query = _select_members(
        jobs.c.id, jobs.c.name, val_loss.is_not(None).label("validated"), value.label("result"), place.label("place")
    )
    query = query.where(tuple_(jobs.c.project, job_labels.c.value).in_(list(sweeps)), value.is_not(None))
    best = query.subquery()
    return {
        (row.project, row.value): SweepResult(
            job=row.id, name=row.name, measure="val_loss" if row.validated else "loss", value=row.result
        )
        for row in tx.execute(select(best).where(best.c.place == 1))
    }


def _select_members(*columns: Any) -> Select[Any]:
    """Makes the query for the jobs of all sweeps: project, name of the sweep (`value`), and these columns."""
    return (
        select(jobs.c.project, job_labels.c.value, *columns)
        .join(job_labels, job_labels.c.job_num == jobs.c.num)
        .where(job_labels.c.key == SWEEP_LABEL)
    )


def _find_jobs(tx: Transaction, project: str, name: str, *, limit: int | None = MAX_COMPARED) -> dict[str, int]:
    """Find the numbers of the newest jobs of a sweep by their ids, newest first. Raises SweepNotFound."""
    query = _select_members(jobs.c.id, jobs.c.num).where(jobs.c.project == project, job_labels.c.value == name)
    rows = tx.execute(query.order_by(jobs.c.num.desc()).limit(limit)).all()
    if not rows:
        raise SweepNotFound(project, name)
    return {row.id: row.num for row in rows}


def _read_reached(tx: Transaction, nums: dict[str, int], measure: Measure) -> dict[str, int]:
    """Return the last step of each job for which it has a value, without the jobs that have none."""
    reached: dict[str, int] = {}
    for job_id, num in nums.items():
        if measure is Measure.VALIDATION:
            query = select(series.c.step).where(series.c.job_num == num, series.c.val_loss.is_not(None))
            step = tx.execute(query.order_by(series.c.step.desc()).limit(1)).scalar_one_or_none()
        else:
            step = rolled_until(tx, num, AVERAGED_STEPS) or None
        if step is not None:
            reached[job_id] = step
    return reached


def _read_values(tx: Transaction, nums: dict[str, int], step: int, measure: Measure) -> dict[str, float]:
    """Return the values of the jobs that have one at this step.

    The finest roll-ups of a job that is far beyond the step are gone: the next coarser one that has the step counts.
    """
    ids = {num: job_id for job_id, num in nums.items()}
    if measure is Measure.VALIDATION:
        query = select(series.c.job_num, series.c.val_loss).where(
            series.c.job_num.in_(ids), series.c.step == step, series.c.val_loss.is_not(None)
        )
        return {ids[num]: value for num, value in tx.execute(query)}
    values: dict[str, float] = {}
    for width in (width for width in WIDTHS if AVERAGED_STEPS <= width <= CHUNK):
        query = select(series_rollups.c.job_num, series_rollups.c.loss).where(
            series_rollups.c.job_num.in_([num for num in ids if ids[num] not in values]),
            series_rollups.c.width == width,
            series_rollups.c.bucket == (step - 1) // width,
        )
        values |= {ids[num]: math.nan if value is None else value for num, value in tx.execute(query)}
    return values


MAX_ROWS = 40_000
"""Rows that are read of all jobs together, about."""
MAX_POINTS = 400
"""Points of a curve, at most."""


def read_curves(tx: Transaction, project: str, name: str, measure: str) -> SweepCurves:
    """Read the curves of the newest jobs, at most MAX_COMPARED. `measure`: loss or val_loss. Raises SweepNotFound."""
    nums = _find_jobs(tx, project, name)
    ids = {num: job_id for job_id, num in nums.items()}
    table, width = _choose_source(tx, list(ids))
    columns = (table.c.job_num, table.c.step, table.c.at, table.c[measure].label("value"))
    query = select(*columns).where(table.c.job_num.in_(ids), table.c[measure].is_not(None))
    if width:
        query = query.where(table.c.width == width)
    points: dict[str, list[tuple[int, float, float]]] = {job_id: [] for job_id in reversed(nums)}
    for row in tx.execute(query.order_by(table.c.job_num, table.c.step)):
        points[ids[row.job_num]].append((row.step, round(row.at, 2), float(f"{row.value:.6g}")))
    best = best_so_far((at, value, job_id) for job_id, curve in points.items() for _, at, value in curve)
    return SweepCurves(
        measure=measure,
        steps_per_point=width or 1,
        jobs=tuple(_make_curve(job_id, curve) for job_id, curve in points.items()),
        best=tuple(SweepBest(at=at, value=value, job=job_id) for at, value, job_id in best),
    )


def _make_curve(job_id: str, points: list[tuple[int, float, float]]) -> SweepCurve:
    step, at, value = zip(*points, strict=True) if points else ((), (), ())
    return SweepCurve(id=job_id, step=step, at=at, value=value)


def _choose_source(tx: Transaction, nums: list[int]) -> tuple[Table, int]:
    """Return the table to read, and the width of its buckets; 0 for the steps themselves."""
    furthest = 0
    for num in nums:  # each has an index with the answer at its end
        newest = tx.execute(select(func.max(series.c.step)).where(series.c.job_num == num)).scalar_one()
        furthest = max(furthest, newest or 0)
    for width in (0, *WIDTHS):
        num_points = furthest // (width or 1)
        if num_points <= MAX_POINTS and num_points * len(nums) <= MAX_ROWS:
            return (series_rollups, width) if width else (series, 0)
    return series_rollups, WIDTHS[-1]
