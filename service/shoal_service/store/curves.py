"""What a job has done over time: roll-ups of its series, and samples of its accounts with the cluster's goodput.

    level 4096   |===============================|
    level  512   |===|===|===|===|===|===|===|===|===|===|
    level   64                                           |=|=|=|
    level    8                                                 |.|.|
    series                                                         ....      a read takes the coarse level first, and
                                                                             goes down for what is not rolled up yet

Roll-ups are means over 8, 64, 512 ... steps, so that a view reads some thousand rows at any length. A bucket is written
when its last step is stored, from the eight buckets below it. After a rollback the buckets of the steps that are
computed again are written again when their last step is. store/reporting.py calls `roll_up`, which also lets
store/thinning.py delete what is far behind.

The cluster's goodput, by ten minutes, is a running sum: each sample adds what its job has booked since its sample
before. So it costs nothing to read, with any number of jobs. `edit.save_all` writes the samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func, select

from shoal_service.core.downsampling import BIN_S, CHUNK, KEPT_STEPS, SeriesPoint, bin_of, bucket_steps, downsample
from shoal_service.core.goodput import Category, recovering
from shoal_service.fleet_views import ClusterGoodput
from shoal_service.store.curve_points import FACTOR, WIDTHS, read_buckets, read_extent, read_pyramid, read_steps
from shoal_service.store.database import Transaction, insert_on_conflict, upsert
from shoal_service.store.records import num_of
from shoal_service.store.tables import fleet_goodput, job_samples, job_specs, jobs, series_rollups
from shoal_service.store.thinning import thin_steps
from shoal_service.views import JobStatus, SampleColumns
from shoal_workers.contract import JobState

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
            rows += _buckets(tx, bucket.job_num, width, begin, bucket.last_step // width)
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
    job_num = num_of(tx, job_id)
    extent = read_extent(tx, job_num)
    if extent is None:
        return []
    first = max(extent[0], after_step + 1)
    last = extent[1] if until_step is None else min(extent[1], until_step)
    num_steps = last - first + 1
    if num_steps <= 0:
        return []
    levels = [width for width in WIDTHS if num_steps > _MAX_ROWS and num_steps // width >= max_points]
    coarsest = next((width for width in levels if num_steps // width <= _MAX_ROWS), levels[-1] if levels else 1)
    reads_all = num_steps <= max_points
    rows = read_pyramid(
        tx, job_num, _VALUES, coarsest=coarsest, after_step=first - 1, until_step=last, with_singles=reads_all
    )
    points = map(point_of, rows)
    if reads_all:
        return list(points)
    return downsample(points, first_step=first, width=bucket_steps(first, last, max_points))


def rolled_until(tx: Transaction, job_num: int) -> int:
    """The last step that is in roll-ups of the finest level. A curve can do without the steps up to it."""
    bucket = tx.execute(_NEWEST_BUCKET, {"of_job": job_num, "of_width": FACTOR}).scalar_one()
    return 0 if bucket is None else (bucket + 1) * FACTOR


def _buckets(tx: Transaction, job_num: int, width: int, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Makes the rows of the buckets [begin, end) of one level, from the level below."""
    points = _below(tx, job_num, width, begin, end)
    for point in downsample(points, first_step=begin * width + 1, width=width):
        yield row_of(point, job_num=job_num, width=width, bucket=(point.step - 1) // width)


def _below(tx: Transaction, job_num: int, width: int, begin: int, end: int) -> Iterable[SeriesPoint]:
    if width == FACTOR:
        rows = read_steps(tx, job_num, _VALUES, begin * width, end * width)
    else:
        rows = read_buckets(tx, job_num, _VALUES, width // FACTOR, begin * FACTOR, end * FACTOR)
    return map(point_of, rows)


def point_of(row: Any) -> SeriesPoint:
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


def row_of(point: SeriesPoint, **key: int) -> dict[str, Any]:
    """Makes the row of a point, or of a mean of points, with the key of its table: NULL for NaN and for no metrics,
    otherwise metrics as JSON."""
    return {
        **key,
        "step": point.step,
        "at": _storable(point.at),
        "loss": _storable(point.loss),
        "grad_norm": _storable(point.grad_norm),
        "lr": _storable(point.lr),
        "tokens_per_s": _storable(point.tokens_per_s),
        "step_s": _storable(point.step_s),
        "world_size": point.world_size,
        "generation": point.generation,
        "val_loss": _storable(point.val_loss),
        "metrics": _json(point.metrics) if point.metrics else None,
        "val_metrics": _json(point.val_metrics) if point.val_metrics else None,
    }


def _storable(value: float | None) -> float | None:
    return None if value is not None and math.isnan(value) else value


def _json(metrics: dict[str, float]) -> str:
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
    added: dict[float, Booked] = {}
    for sample in taken:
        if sample.booked.total > sample.before.total:
            bin_at = bin_of(sample.row["at"])
            sums = added.get(bin_at, Booked(0.0, 0.0))
            added[bin_at] = Booked(
                sums.productive + sample.booked.productive - sample.before.productive,
                sums.total + sample.booked.total - sample.before.total,
            )
    for bin_at, more in added.items():
        statement = insert_on_conflict(tx, fleet_goodput).values(bin_at=bin_at, **more._asdict())
        tx.execute(
            statement.on_conflict_do_update(
                index_elements=["bin_at"],
                set_={
                    "productive": fleet_goodput.c.productive + statement.excluded.productive,
                    "total": fleet_goodput.c.total + statement.excluded.total,
                },
            )
        )


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
    job_num = num_of(tx, job_id)
    query = select(job_samples).where(job_samples.c.job_num == job_num, job_samples.c.at > after)
    rows = _thinned(list(tx.execute(query.order_by(job_samples.c.at))))
    wanted = _wanted(tx, job_num)
    documents = [json.loads(row.seconds) for row in rows]
    present = [category for category in Category if any(category.value in document for document in documents)]
    return SampleColumns(
        at=tuple(round(row.at, 2) for row in rows),
        step=tuple(row.step for row in rows),
        state=tuple(JobState(row.state) for row in rows),
        wanted=tuple(_wanted_at(wanted, row.at) for row in rows),
        granted=tuple(row.granted for row in rows),
        workers=tuple(row.workers for row in rows),
        seconds={
            category: tuple(round(document.get(category.value, 0.0), 1) for document in documents)
            for category in present
        },
    )


def _thinned(rows: list[Any]) -> list[Any]:
    if len(rows) <= _MAX_SAMPLES:
        return rows
    every = -(-len(rows) // _MAX_SAMPLES)
    kept = []
    for index, row in enumerate(rows):
        before = rows[index - 1] if index else None
        changed = before is None or (row.state, row.granted, row.workers) != (
            before.state,
            before.granted,
            before.workers,
        )
        if changed or index % every == 0 or index == len(rows) - 1:
            kept.append(row)
    return kept[-4 * _MAX_SAMPLES :]


def _wanted(tx: Transaction, job_num: int) -> list[tuple[float, int]]:
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


def _wanted_at(wanted: list[tuple[float, int]], at: float) -> int:
    """The value that was wanted at a time. If the wall clock was set back, the first version holds."""
    return next((number for since, number in reversed(wanted) if since <= at), wanted[0][1])
