"""What a job has done over time: roll-ups of its series, and samples of its accounts with the cluster's goodput.

    level 4096   |===============================|
    level  512   |===|===|===|===|===|===|===|===|===|===|
    level   64                                           |=|=|=|
    level    8                                                 |.|.|
    series                                                         ....      a read takes the coarse level first, and
                                                                             goes down for what is not rolled up yet

Roll-ups are means over 8, 64, 512 ... steps, so that a view reads some thousand rows at any length. A bucket is written
when its last step is stored, from the eight buckets below it. After a rollback the buckets of the steps that are
computed again are written again when their last step is. store/reporting.py calls `roll_up`, which also deletes what is
far behind.

The cluster's goodput, by ten minutes, is a running sum: each sample adds what its job has booked since its sample
before. So it costs nothing to read, with any number of jobs. `edit.save_all` writes the samples.

What a running job needs no more is deleted as it goes: single steps, fine roll-ups, and events of routine.

    level 4096   |=======================================|     of every step
    level  512   |   |===================================|
    level   64   |           |===========================|     of each finer level the newest KEPT_STEPS
    level    8   |                   |===================|
    series       .  .   . .      .   . .    .|...........|     and the steps of core/downsampling.py::steps_to_keep
                                             jobs.thinned_until

So a job of any length has about half a million rows. A few chunks go with each report that completes one, also of a job
that was never thinned: each transaction stays short. What ended jobs leave behind is deleted by age (job_deletion.py).

`read_points` reads few points of a curve, as rows of the requested columns:

    at least 60 points of a job with 100,000 steps: 195 buckets of 512 steps, then of 64 and 8, then steps

A read takes the widest buckets that give a curve at least `min_points` points, so it has at most eight times as many,
and some thirty for the end that is not rolled up yet. Where old rows of a level were deleted (also by the
retention of ended jobs) it takes the next coarser one. `newest_steps` reads how long the steps of the newest jobs took,
for predictions of other jobs on the same hardware.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, ScalarSelect, Select, bindparam, delete, func, or_, select, update

from shoal_service.core.downsampling import (
    AROUND,
    BIN_S,
    CHUNK,
    KEPT_EVENTS,
    KEPT_STEPS,
    MEASURES,
    Columns,
    SeriesPoint,
    bin_of,
    bucket_steps,
    downsample,
    steps_to_keep,
)
from shoal_service.core.events.catalogue import ROUTINE
from shoal_service.core.goodput import Category, recovering
from shoal_service.fleet_views import ClusterGoodput
from shoal_service.store.database import (
    Transaction,
    checkpoints,
    events,
    fleet_goodput,
    insert_on_conflict,
    job_samples,
    job_specs,
    jobs,
    series,
    series_rollups,
    upsert,
    webhook_cursors,
)
from shoal_service.store.records import load_spec, read_job_num
from shoal_service.views import CheckpointState, JobStatus, SampleColumns
from shoal_workers.contract import JobSpec, JobState

MAX_STEP = 2**62
FACTOR = 8
WIDTHS = tuple(FACTOR**n for n in range(1, 7))
"""Steps per bucket of each level of roll-ups."""
_ROWS_AT_ONCE = 5_000
_THINNED_UNTIL = select(jobs.c.thinned_until).where(jobs.c.num == bindparam("of_job"))


def _end(of: Any, column: Column[int], *conditions: ColumnElement[bool]) -> ScalarSelect[Any]:
    """Select the smallest or largest value, in a separate query, which the end of an index answers."""
    return select(of(column)).where(column.table.c.job_num == bindparam("of_job"), *conditions).scalar_subquery()


_STEP_EXTENT = select(
    _end(func.min, series.c.step).label("first"),
    _end(func.max, series.c.step).label("last"),
    *(_end(func.min, series_rollups.c.bucket, series_rollups.c.width == width) for width in WIDTHS),
    ((_end(func.max, series_rollups.c.bucket, series_rollups.c.width == FACTOR) + 1) * FACTOR).label("rolled_until"),
)


def read_points(
    tx: Transaction,
    num: int,
    columns: tuple[str, ...],
    *,
    min_points: int,
    last_step: int,
    after_step: int = -1,
    until_step: int = MAX_STEP,
) -> list[Any]:
    """Return step, time and these columns of each point of job `num`, whose newest step is `last_step`.

    Args:
        min_points: points at least, if the job has as many steps after `after_step` and up to `until_step`.
    """
    num_steps = min(last_step, until_step) - max(after_step, 0)
    levels = _Levels(tx, num, columns)
    for width in reversed(WIDTHS):
        if num_steps // width >= min_points:
            rows = list(levels.read(width, after_step, until_step))
            if len(rows) >= min_points:
                return rows
            # A job that goes on from another one's checkpoint has fewer steps than the number of its last one says.
    return list(levels.read(1, after_step, until_step))


def read_extent(tx: Transaction, num: int) -> tuple[int, int] | None:
    """Return the first and the last step of the job's curve; None if it has no step.

    A level begins earlier than the finer one only if old rows of that were deleted: a job that goes on from another
    job's checkpoint begins within a bucket.
    """
    row = tx.execute(_STEP_EXTENT, {"of_job": num}).one()
    first, last = row.first, row.last
    for width, bucket in zip(WIDTHS, row[2:-1], strict=True):
        if bucket is not None and (first is None or (bucket + 1) * width < first):
            first = bucket * width + 1
    if first is None:
        return None
    return first, last if last is not None else row.rolled_until


@dataclass(frozen=True, slots=True)
class _Levels:
    """Reads columns of a job's steps (width 1) and of their roll-ups."""

    tx: Transaction
    num: int
    columns: tuple[str, ...]

    def read(self, coarsest: int, after: int, until: int, *, with_singles: bool = True) -> Iterator[Any]:
        """Yield the rows after step `after` up to `until`: those of the level `coarsest` as far as it goes. After it
        come finer levels, whose rows are not rolled up yet. Before it, where old rows of it were deleted, are coarser
        ones.

        Args:
            with_singles: also the steps that stayed where the others were deleted; of the steps themselves only.
        """
        thinned = self.tx.execute(_THINNED_UNTIL, {"of_job": self.num}).scalar_one() if coarsest == 1 else 0
        rows = self._read_on(coarsest, max(after, min(thinned, until)), until)
        first = next(rows, None)
        earlier = self._read_before(coarsest, after, until if first is None else first.step - coarsest)
        if with_singles and after < thinned:
            earlier |= {row.step: row for row in self.read_level(1, after, min(thinned, until))}
        for step in sorted(earlier):
            yield earlier[step]
        if first is not None:
            yield first
            yield from rows

    def _read_on(self, coarsest: int, after: int, until: int) -> Iterator[Any]:
        """Yield the rows of a level, and of finer ones what is not rolled up yet."""
        for width in reversed([width for width in (1, *WIDTHS) if width <= coarsest]):
            for row in self.read_level(width, after, until):
                if row.step > after:
                    after = row.step
                    yield row

    def _read_before(self, finer: int, after: int, until: int) -> dict[int, Any]:
        """Return the rows up to the step at which a level begins, by step: of the next coarser level, and of still
        coarser ones what that lacks."""
        earlier: dict[int, Any] = {}
        for width in (width for width in WIDTHS if width > finer):
            rows = list(self.read_level(width, after, until)) if until > max(after, 0) else []
            earlier |= {row.step: row for row in rows if row.step > after}
            until = rows[0].step - width if rows else until
        return earlier

    def read_level(self, width: int, after: int, until: int) -> Iterator[Any]:
        """Yield the rows of one level that end after step `after` and up to `until`."""
        if width > 1:  # from steps to numbers of buckets: bucket 0 ends at step `width`
            after, until = max(after, 0) // width - 1, until // width - 1
        bounds = {"of_job": self.num, "of_width": width, "after": after, "until": until}
        yield from self.tx.execute(_select_level(self.columns, width == 1), bounds)


@cache
def _select_level(columns: tuple[str, ...], is_single: bool) -> Select[Any]:
    """Select the steps, or the buckets of a width, after the number `after` up to `until`."""
    table = series if is_single else series_rollups
    number = series.c.step if is_single else series_rollups.c.bucket
    query = select(table.c.step, table.c.at, *(table.c[name] for name in columns)).where(
        table.c.job_num == bindparam("of_job"), number > bindparam("after"), number <= bindparam("until")
    )
    if not is_single:
        query = query.where(series_rollups.c.width == bindparam("of_width"))
    elif "metrics" in columns:  # large rows, and there may be a million: the database keeps those that are not read yet
        query = query.execution_options(yield_per=_ROWS_AT_ONCE)
    return query.order_by(number)


_MAX_ROWS = 4_000
"""At most this many rows of the coarsest level are read before means of them are made."""
_VALUES = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "step_s",
    "world_size",
    "generation",
    "val_loss",
    "metrics",
    "val_metrics",
)  # fmt: skip - a list of names

_NEWEST_BUCKET = select(func.max(series_rollups.c.bucket)).where(
    series_rollups.c.job_num == bindparam("of_job"), series_rollups.c.width == bindparam("of_width")
)
_NEWEST_BUCKETS = select(
    jobs.c.num,
    select(func.max(series_rollups.c.bucket))
    .where(series_rollups.c.job_num == jobs.c.num, series_rollups.c.width == bindparam("of_width"))
    .scalar_subquery()
    .label("bucket"),
).where(jobs.c.num.in_(bindparam("of_jobs", expanding=True)))
"""Each job has a query of its own, for which an index has the answer at its end."""


class Extent(NamedTuple):
    """A gapless range of steps of a job that were stored just now."""

    job_num: int
    first_step: int
    last_step: int


def roll_up(tx: Transaction, stored: Sequence[Extent], *, kept_steps: int = KEPT_STEPS) -> None:
    """Writes the buckets that new steps of different jobs complete, and those that are missing before, and thins what
    lies more than `kept_steps` behind. Called after the steps were stored."""
    for width in WIDTHS:
        # if no bucket of this width ends here, none of a larger one does
        stored = [bucket for bucket in stored if bucket.last_step // width > (bucket.first_step - 1) // width]
        if not stored:
            return
        of_jobs = [bucket.job_num for bucket in stored]
        buckets = tx.execute(_NEWEST_BUCKETS, {"of_jobs": of_jobs, "of_width": width})
        known: dict[int, int | None] = {row.num: row.bucket for row in buckets}
        rows: list[dict[str, Any]] = []
        for bucket in stored:
            newest = known[bucket.job_num]
            begin = min((bucket.first_step - 1) // width, 0 if newest is None else newest + 1)
            rows += _make_buckets(tx, bucket.job_num, width, begin, bucket.last_step // width)
        upsert(tx, series_rollups, rows)
        if width == CHUNK:
            for bucket in stored:
                thin_steps(tx, **bucket._asdict(), kept_steps=kept_steps)


def read_curve(
    tx: Transaction, job_id: str, *, max_points: int, after_step: int = 0, until_step: int | None = None
) -> list[SeriesPoint]:
    """Read the steps after `after_step` up to `until_step`, as at most `max_points` points.

    Points are means over equal buckets if there are more steps, or if the single steps are gone. Raises JobNotFound.
    """
    job_num = read_job_num(tx, job_id)
    extent = read_extent(tx, job_num)
    if extent is None:
        return []
    first = max(extent[0], after_step + 1)
    last = extent[1] if until_step is None else min(extent[1], until_step)
    num_steps = last - first + 1
    if num_steps <= 0:
        return []
    widths = [width for width in WIDTHS if num_steps > _MAX_ROWS and num_steps // width >= max_points]
    coarsest = next((width for width in widths if num_steps // width <= _MAX_ROWS), widths[-1] if widths else 1)
    reads_all = num_steps <= max_points
    levels = _Levels(tx, job_num, _VALUES)
    points = map(make_point, levels.read(coarsest, first - 1, last, with_singles=reads_all))
    if reads_all:
        return list(points)
    return downsample(points, first_step=first, width=bucket_steps(first, last, max_points))


def rolled_until(tx: Transaction, job_num: int, width: int = FACTOR) -> int:
    """Return the last step in roll-ups over `width` steps, 0 if there are none. A curve can do without the steps up to
    that of the finest level."""
    bucket = tx.execute(_NEWEST_BUCKET, {"of_job": job_num, "of_width": width}).scalar_one()
    return 0 if bucket is None else (bucket + 1) * width


def _make_buckets(tx: Transaction, job_num: int, width: int, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Makes the rows of the buckets [begin, end) of one level, from the level below."""
    below = _Levels(tx, job_num, _VALUES).read_level(width // FACTOR, begin * width, end * width)
    for point in downsample(map(make_point, below), first_step=begin * width + 1, width=width):
        yield make_row(point, job_num=job_num, width=width, bucket=(point.step - 1) // width)


def make_point(row: Any) -> SeriesPoint:
    """Makes a point of a row of the series or of its roll-ups; without validation, since there are many."""
    return SeriesPoint.model_construct(
        step=row.step,
        at=row.at,
        loss=math.nan if row.loss is None else row.loss,
        grad_norm=math.nan if row.grad_norm is None else row.grad_norm,
        lr=math.nan if row.lr is None else row.lr,
        tokens_per_s=math.nan if row.tokens_per_s is None else row.tokens_per_s,
        step_s=row.step_s,
        world_size=row.world_size,
        generation=row.generation,
        val_loss=row.val_loss,
        metrics=json.loads(row.metrics) if row.metrics else {},
        val_metrics=json.loads(row.val_metrics) if row.val_metrics else {},
    )


def make_row(point: SeriesPoint, **key: int) -> dict[str, Any]:
    """Makes the row of a point, or of a mean of points, with the key of its table: NULL for NaN and for no metrics,
    otherwise metrics as JSON."""
    return {
        **key,
        "step": point.step,
        "at": _nan_to_null(point.at),
        "loss": _nan_to_null(point.loss),
        "grad_norm": _nan_to_null(point.grad_norm),
        "lr": _nan_to_null(point.lr),
        "tokens_per_s": _nan_to_null(point.tokens_per_s),
        "step_s": _nan_to_null(point.step_s),
        "world_size": point.world_size,
        "generation": point.generation,
        "val_loss": _nan_to_null(point.val_loss),
        "metrics": _dump_metrics(point.metrics) if point.metrics else None,
        "val_metrics": _dump_metrics(point.val_metrics) if point.val_metrics else None,
    }


def _nan_to_null(value: float | None) -> float | None:
    return None if value is not None and math.isnan(value) else value


def _dump_metrics(metrics: dict[str, float]) -> str:
    return json.dumps(metrics, separators=(",", ":"))


_MAX_SAMPLES = 250
"""At most this many samples are in a document. The others are left out evenly, but no change of state or world size
is."""
_DAY_S = 86_400.0


class Booked(NamedTuple):
    """Worker-seconds of a job."""

    productive: float
    total: float


@dataclass(frozen=True, slots=True)
class Sample:
    row: dict[str, Any]
    booked: Booked
    before: Booked
    """The worker-seconds at the job's sample before."""


def take_sample(
    job_num: int, *, state: JobState, granted: int, status: JobStatus, before: Booked, now: float
) -> Sample:
    goodput = status.goodput
    seconds = goodput.seconds if goodput is not None else {}
    shown = {name.value: round(amount, 3) for name, amount in seconds.items() if amount}
    causes = goodput.recovering if goodput is not None else {}
    shown |= {recovering(cause): round(amount, 3) for cause, amount in causes.items() if amount}
    row = {
        "job_num": job_num,
        "at": now,
        "state": state.value,
        "step": status.step,
        "granted": granted,
        "workers": status.workers,
        "seconds": json.dumps(shown, separators=(",", ":")),
    }
    total = goodput.total if goodput is not None else 0.0
    return Sample(row, Booked(seconds.get(Category.PRODUCTIVE, 0.0), total), before)


def store_samples(tx: Transaction, taken: Sequence[Sample]) -> None:
    """Stores samples of different jobs. A sample replaces that of the same job at the same time."""
    upsert(tx, job_samples, [sample.row for sample in taken])
    added = [
        {
            "bin_at": bin_of(sample.row["at"]),
            "productive": sample.booked.productive - sample.before.productive,
            "total": sample.booked.total - sample.before.total,
        }
        for sample in taken
        if sample.booked.total > sample.before.total
    ]
    if added:
        statement = insert_on_conflict(tx, fleet_goodput)
        sums = {name: fleet_goodput.c[name] + statement.excluded[name] for name in ("productive", "total")}
        tx.execute(statement.on_conflict_do_update(index_elements=["bin_at"], set_=sums), added)


def cluster_goodput(tx: Transaction) -> tuple[ClusterGoodput, ...]:
    """The cluster's goodput in the 24 hours before the newest sample."""
    newest = select(func.max(fleet_goodput.c.bin_at)).scalar_subquery()
    query = (
        select(fleet_goodput)
        .where(fleet_goodput.c.bin_at > newest - _DAY_S + BIN_S / 2)
        .order_by(fleet_goodput.c.bin_at)
    )
    return tuple(ClusterGoodput(at=row.bin_at, productive=row.productive, total=row.total) for row in tx.execute(query))


def read_samples(tx: Transaction, job_id: str, *, after: float = 0.0) -> SampleColumns:
    """Read the samples of a job's accounts after a time, oldest first. Raises JobNotFound."""
    job_num = read_job_num(tx, job_id)
    query = select(job_samples).where(job_samples.c.job_num == job_num, job_samples.c.at > after)
    rows = _thin_out(list(tx.execute(query.order_by(job_samples.c.at))))
    wanted = _list_wanted(tx, job_num)
    documents = [json.loads(row.seconds) for row in rows]
    present = [category for category in Category if any(category.value in document for document in documents)]
    return SampleColumns(
        at=tuple(round(row.at, 2) for row in rows),
        step=tuple(row.step for row in rows),
        state=tuple(JobState(row.state) for row in rows),
        wanted=tuple(_find_wanted(wanted, row.at) for row in rows),
        granted=tuple(row.granted for row in rows),
        workers=tuple(row.workers for row in rows),
        seconds={
            category: tuple(round(document.get(category.value, 0.0), 1) for document in documents)
            for category in present
        },
    )


def _thin_out(rows: list[Any]) -> list[Any]:
    if len(rows) <= _MAX_SAMPLES:
        return rows
    every = -(-len(rows) // _MAX_SAMPLES)
    values = [(row.state, row.granted, row.workers) for row in rows]
    changed = [True, *(now != before for before, now in pairwise(values))]
    last = len(rows) - 1
    kept = [row for index, row in enumerate(rows) if changed[index] or index % every == 0 or index == last]
    return kept[-4 * _MAX_SAMPLES :]


def _list_wanted(tx: Transaction, job_num: int) -> list[tuple[float, int]]:
    """Each `elasticity.max_workers`, with the time since which it has been in force."""
    query = (
        select(job_specs.c.accepted_at, job_specs.c.document)
        .where(job_specs.c.job_num == job_num)
        .order_by(job_specs.c.version)
    )
    return [
        (row.accepted_at, int(json.loads(row.document).get("elasticity", {}).get("max_workers", 1)))
        for row in tx.execute(query)
    ]


def _find_wanted(wanted: list[tuple[float, int]], at: float) -> int:
    """The value that was wanted at a time. If the wall clock was set back, the first version holds."""
    return next((number for since, number in reversed(wanted) if since <= at), wanted[0][1])


_CHUNKS_AT_ONCE = 3
_EVENTS_AT_ONCE = 2_000
_EVENTS_EVERY = 500
"""New events of a job after which old ones are deleted."""
_FINER = tuple(width for width in WIDTHS if width < CHUNK)
_EXTENT = select(
    jobs.c.thinned_until,
    select(func.min(series.c.step)).where(series.c.job_num == bindparam("of_job")).scalar_subquery(),
).where(jobs.c.num == bindparam("of_job"))


def thin_steps(tx: Transaction, job_num: int, *, first_step: int, last_step: int, kept_steps: int) -> None:
    """Thins the oldest chunks that are not thinned. Called when the steps from `first_step` to `last_step` were stored
    and rolled up. A job that went back to an early step is thinned from there again."""
    thinned, lowest = tx.execute(_EXTENT, {"of_job": job_num}).one()
    begin = max(min(thinned, _begin_of_chunk(first_step)), _begin_of_chunk(lowest))
    newest = last_step // CHUNK * CHUNK
    until = max(begin, min((newest - kept_steps) // CHUNK * CHUNK, begin + _CHUNKS_AT_ONCE * CHUNK))
    for chunk in range(begin, until, CHUNK):
        _thin_chunk(tx, job_num, chunk)
    if until != thinned:
        tx.execute(update(jobs).where(jobs.c.num == job_num).values(thinned_until=until))
    for width in _FINER:
        _thin_level(tx, job_num, width, newest - kept_steps * width)


def _begin_of_chunk(step: int) -> int:
    return (step - 1) // CHUNK * CHUNK


def _thin_chunk(tx: Transaction, job_num: int, begin: int) -> None:
    end = begin + CHUNK
    columns = ("step", "generation", "world_size", "val_loss", *MEASURES)
    query = select(*(series.c[name] for name in columns)).where(
        series.c.job_num == job_num, series.c.step > begin, series.c.step <= end + AROUND
    )
    if steps := tx.execute(query.order_by(series.c.step)).all():
        step, generation, world_size, val_loss, *measures = zip(*steps, strict=True)
        rows = Columns(step, generation, world_size, val_loss, measures)
        stay = {*steps_to_keep(rows), *_list_saved_steps(tx, job_num, begin, end)}
        in_chunk = (series.c.job_num == job_num, series.c.step > begin, series.c.step <= end)
        tx.execute(delete(series).where(*in_chunk, series.c.step.not_in(sorted(stay))))


def _list_saved_steps(tx: Transaction, job_num: int, begin: int, end: int) -> Iterator[int]:
    """The steps whose checkpoints are there: the model registry shows what was measured at them."""
    yield from tx.execute(
        select(checkpoints.c.step).where(
            checkpoints.c.job_num == job_num,
            checkpoints.c.step > begin,
            checkpoints.c.step <= end,
            checkpoints.c.state == CheckpointState.COMMITTED.value,
        )
    ).scalars()


def _thin_level(tx: Transaction, job_num: int, width: int, until_step: int) -> None:
    """Deletes the oldest roll-ups over `width` steps, up to that step."""
    level = (series_rollups.c.job_num == job_num, series_rollups.c.width == width)
    lowest = tx.execute(select(func.min(series_rollups.c.bucket)).where(*level)).scalar_one()
    if lowest is not None:
        until = min(until_step, _begin_of_chunk(lowest * width + 1) + _CHUNKS_AT_ONCE * CHUNK)
        tx.execute(delete(series_rollups).where(*level, series_rollups.c.bucket < until // width))


def thin_events(tx: Transaction, job_num: int, *, before: int, last: int, kept_events: int = KEPT_EVENTS) -> None:
    """Deletes old events of routine, as far as every webhook has settled them. Called when the events after number
    `before` up to `last` were stored."""
    if last <= kept_events or last // _EVENTS_EVERY == before // _EVENTS_EVERY:
        return
    settled = select(func.min(webhook_cursors.c.seq)).where(webhook_cursors.c.job_num == job_num).scalar_subquery()
    old = select(events.c.seq).where(
        events.c.job_num == job_num,
        events.c.seq <= last - kept_events,
        events.c.type.in_(ROUTINE),
        or_(settled.is_(None), events.c.seq <= settled),
    )
    oldest = old.order_by(events.c.seq).limit(_EVENTS_AT_ONCE)
    tx.execute(delete(events).where(events.c.job_num == job_num, events.c.seq.in_(oldest)))


_STEPS = 33
"""The newest steps of a job whose median counts; a job with fewer is left out. As many as measure a shard level."""


class JobSteps(NamedTuple):
    """The newest steps of one job, all with the same number of workers."""

    spec: JobSpec
    workers: int
    step_s: float
    """Median."""


def newest_steps(tx: Transaction, *, max_jobs: int = 8) -> list[JobSteps]:
    """Reads the jobs that changed last. Jobs of the user's own programs, whose sizes are unknown, are left out."""
    rows = tx.execute(select(jobs.c.num, jobs.c.spec_version).order_by(jobs.c.updated_at.desc()).limit(max_jobs))
    measured = []
    for num, version in rows.all():
        points = tx.execute(
            select(series.c.step_s, series.c.world_size, series.c.generation)
            .where(series.c.job_num == num, series.c.val_loss.is_(None))
            .order_by(series.c.step.desc())
            .limit(_STEPS)
        ).all()
        if len(points) < _STEPS or len({(point.world_size, point.generation) for point in points}) > 1:
            continue
        spec = load_spec(tx, num, version)
        if spec.program is None:
            measured.append(JobSteps(spec, points[0].world_size, median(point.step_s for point in points)))
    return measured
