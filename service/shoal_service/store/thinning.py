"""Deletes what a running job needs no more, as it goes: single steps, fine roll-ups, and events of routine.

    level 4096   |=======================================|     of every step
    level  512   |   |===================================|
    level   64   |           |===========================|     of each finer level the newest KEPT_STEPS
    level    8   |                   |===================|
    series       .  .   . .      .   . .    .|...........|     and the steps of core/downsampling.py::steps_to_keep
                                             jobs.thinned_until

So a job of any length has about half a million rows. A few chunks go with each report that completes one, also of a job
that was never thinned: each transaction stays short. `curves.roll_up` and `edit.save_all` call it; what ended jobs
leave behind is deleted by age (job_deletion.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import bindparam, delete, func, or_, select, update

from shoal_service.core.downsampling import AROUND, CHUNK, KEPT_EVENTS, MEASURES, Columns, steps_to_keep
from shoal_service.core.events.catalogue import ROUTINE
from shoal_service.store.curve_points import WIDTHS
from shoal_service.store.database import Transaction
from shoal_service.store.tables import checkpoints, events, jobs, series, series_rollups, webhook_cursors
from shoal_service.views import CheckpointState

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
        stay = {*steps_to_keep(rows), *_saved_steps(tx, job_num, begin, end)}
        in_chunk = (series.c.job_num == job_num, series.c.step > begin, series.c.step <= end)
        tx.execute(delete(series).where(*in_chunk, series.c.step.not_in(sorted(stay))))


def _saved_steps(tx: Transaction, job_num: int, begin: int, end: int) -> Iterator[int]:
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
