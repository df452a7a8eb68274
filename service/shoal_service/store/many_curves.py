"""Curves of many jobs at once, for a workspace: few points of each, as `curve_points.py` reads them.

A curve is kept until its job changes: the curves of ended jobs are read once for all who look at them. Called by the
HTTP edge on worker threads.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from shoal_service.core.where.language import parse_columns
from shoal_service.fleet_views import Curve, FleetJob, JobCurves
from shoal_service.store import job_lists
from shoal_service.store.curve_points import MAX_STEP, points_of
from shoal_service.store.database import Transaction
from shoal_service.store.job_conditions import values_of
from shoal_service.store.job_lists import FleetQuery
from shoal_service.store.tables import jobs

PLAIN_METRICS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size")
NESTED_METRICS = {"metric": "metrics", "val": "val_metrics"}
"""The task's own metrics are named `metric.NAME` and `val.NAME`, as in conditions."""
_KEPT = 2_000
_KEPT_POSITIONS = 200
Versions = dict[str, tuple[float, int, str]]
"""What was read of each job, by id: the time of its newest change, its step and its state."""
_BATCH_SIZE = parse_columns("batch.global_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is read of each job."""

    metrics: tuple[str, ...]
    """Names of PLAIN_METRICS, `metric.NAME` and `val.NAME`."""
    after_step: int = -1
    until_step: int = MAX_STEP
    least: int = 60
    """Points of each curve at least, if it has as many steps."""
    packed: bool = False


def is_metric(name: str) -> bool:
    """Return whether a curve can have this name."""
    family, dot, rest = name.partition(".")
    return name in PLAIN_METRICS or bool(dot and rest and family in NESTED_METRICS)


class ManyCurves:
    """Keeps curves of jobs that have not changed. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, Curve] = OrderedDict()
        self._positions: OrderedDict[str, Versions] = OrderedDict()

    def read(
        self, tx: Transaction, query: FleetQuery, wanted: Wanted, *, known: Versions | None = None
    ) -> tuple[tuple[JobCurves, ...], Versions]:
        """The jobs that match with their curves, and the versions of all of them, in their order.

        Args:
            known: only jobs that have another version than there.
        """
        job_page = job_lists.plain_fleet_page(tx, query)
        versions = {job.id: (job.updated_at, job.step, job.state.value) for job in job_page.values()}
        changed = {num: job for num, job in job_page.items() if known is None or known.get(job.id) != versions[job.id]}
        nums = list(changed)
        found_statuses = tx.execute(select(jobs.c.num, jobs.c.status).where(jobs.c.num.in_(nums)))
        statuses: dict[int, str] = {row.num: row.status for row in found_statuses}
        sizes = values_of(tx, nums, _BATCH_SIZE)
        items = tuple(
            JobCurves.model_construct(
                **dict(job),
                tokens_per_step=_tokens_per_step(statuses.get(num, "")),
                samples_per_step=next(iter(sizes[num].values()), None) if num in sizes else None,
                curve=self._curve(tx, num, job, wanted),
            )
            for num, job in changed.items()
        )
        return items, versions

    def remember(self, position: str, versions: Versions) -> None:
        """Keeps what a client has received."""
        with self._lock:
            self._positions[position] = versions
            self._positions.move_to_end(position)
            while len(self._positions) > _KEPT_POSITIONS:
                self._positions.popitem(last=False)

    def versions_at(self, position: str) -> Versions | None:
        """What a client with this position has; None if that is not known any more, so it gets everything."""
        with self._lock:
            return self._positions.get(position)

    def _curve(self, tx: Transaction, num: int, job: FleetJob, wanted: Wanted) -> Curve:
        key = (num, job.updated_at, job.step, wanted)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        made = _as_curve(_rows(tx, num, job.step, wanted), wanted)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


def _rows(tx: Transaction, num: int, last_step: int, wanted: Wanted) -> list[Any]:
    """Step, time and the wanted columns of each point."""
    return points_of(
        tx,
        num,
        _columns(wanted.metrics),
        least=wanted.least,
        after_step=wanted.after_step,
        until_step=wanted.until_step,
        last_step=last_step,
    )


def _columns(metrics: Sequence[str]) -> tuple[str, ...]:
    """Names of the database's columns that hold these metrics."""
    return tuple(sorted({NESTED_METRICS.get(name.partition(".")[0], name) for name in metrics}))


def _as_curve(rows: Sequence[Any], wanted: Wanted) -> Curve:
    by_column = (
        dict(zip(("step", "at", *_columns(wanted.metrics)), zip(*rows, strict=True), strict=True)) if rows else {}
    )
    documents: dict[str, list[dict[str, Any]]] = {}
    values: dict[str, list[float | None]] = {}
    for name in wanted.metrics if rows else ():
        family, _, own = name.partition(".")
        if own and family in NESTED_METRICS:
            if family not in documents:
                # one document of all points is parsed in a third of the time of one for each
                texts = ",".join(text or "{}" for text in by_column[NESTED_METRICS[family]])
                documents[family] = json.loads(f"[{texts}]")
            numbers: Iterable[float | None] = [document.get(own) for document in documents[family]]
        else:
            numbers = by_column[name]
        # the difference is 0 for a number, and NaN, which is true, if the value is not finite
        column = [None if value is None or value - value else value for value in numbers]
        if column.count(None) < len(column):
            values[name] = column
    steps, times = by_column.get("step", ()), by_column.get("at", ())
    if not wanted.packed:
        return Curve.model_construct(step=steps, at=times, values={name: tuple(v) for name, v in values.items()})
    return Curve.model_construct(
        step=_packed("d", steps),
        at=_packed("d", times),
        values={
            name: _packed("f", [math.nan if number is None else number for number in v]) for name, v in values.items()
        },
    )


def _packed(kind: str, numbers: Iterable[float]) -> str:
    made = array(kind, numbers)
    if sys.byteorder == "big":
        made.byteswap()
    return base64.b64encode(made.tobytes()).decode()


def _tokens_per_step(status: str) -> float | None:
    try:
        document = json.loads(status)
        return document["tokens"] / document["step"] or None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
