"""Reads curves of many jobs at once, for a workspace: few points of each, by `curves.py`.

A curve is cached until its job changes, so the curves of ended jobs are read once for all clients. Called by the HTTP
edge on worker threads.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from shoal_service.core.where.language import parse_columns
from shoal_service.fleet_views import Curve, FleetJob, JobCurves
from shoal_service.store import job_lists
from shoal_service.store.curves import MAX_STEP, read_points
from shoal_service.store.database import Transaction, jobs
from shoal_service.store.job_conditions import read_values
from shoal_service.store.job_lists import FleetQuery
from shoal_workers.recently_used import RecentlyUsed

PLAIN_METRICS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size")
NESTED_METRICS = {"metric": "metrics", "val": "val_metrics"}
"""The task's own metrics are named `metric.NAME` and `val.NAME`, as in conditions."""
_MAX_CURVES = 2_000
_MAX_POSITIONS = 200
Versions = dict[str, tuple[float, int, str]]
"""The version of each job that was read, by id: the time of its newest change, its step and its state."""
_BATCH_SIZE = parse_columns("batch.global_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuery:
    """Selects the metrics and the points of each job's curve."""

    metrics: tuple[str, ...]
    """Names of PLAIN_METRICS, `metric.NAME` and `val.NAME`."""
    after_step: int = -1
    until_step: int = MAX_STEP
    min_points: int = 60
    """Points of each curve at least, if it has as many steps."""
    packed: bool = False


def is_metric(name: str) -> bool:
    """Return True if a curve can have this name."""
    family, dot, rest = name.partition(".")
    return name in PLAIN_METRICS or bool(dot and rest and family in NESTED_METRICS)


class CurveCache:
    """Reads curves, and keeps those of jobs that have not changed. Thread-safe."""

    def __init__(self) -> None:
        self._curves: RecentlyUsed[Any, Curve] = RecentlyUsed(_MAX_CURVES)
        self.positions: RecentlyUsed[str, Versions] = RecentlyUsed(_MAX_POSITIONS)
        """The versions that a client with a position has received."""

    def read(
        self, tx: Transaction, query: FleetQuery, curve_query: CurveQuery, *, known: Versions | None = None
    ) -> tuple[tuple[JobCurves, ...], Versions]:
        """Return the matching jobs with curves, and the versions of all.

        Args:
            known: versions that the client has; jobs that have not changed since are left out.
        """
        job_page = job_lists.plain_fleet_page(tx, query)
        versions = {job.id: (job.updated_at, job.step, job.state.value) for job in job_page.values()}
        changed = {num: job for num, job in job_page.items() if known is None or known.get(job.id) != versions[job.id]}
        nums = list(changed)
        rows = tx.execute(select(jobs.c.num, jobs.c.status).where(jobs.c.num.in_(nums)))
        statuses: dict[int, str] = {row.num: row.status for row in rows}
        sizes = read_values(tx, nums, _BATCH_SIZE)
        items = tuple(
            JobCurves.model_construct(
                **dict(job),
                tokens_per_step=_find_tokens_per_step(statuses.get(num, "")),
                samples_per_step=next(iter(sizes[num].values()), None) if num in sizes else None,
                curve=self._read_curve(tx, num, job, curve_query),
            )
            for num, job in changed.items()
        )
        return items, versions

    def _read_curve(self, tx: Transaction, num: int, job: FleetJob, query: CurveQuery) -> Curve:
        key = (num, job.updated_at, job.step, query)
        curve = self._curves.get(key)
        if curve is None:
            points = read_points(
                tx,
                num,
                _column_names(query.metrics),
                min_points=query.min_points,
                after_step=query.after_step,
                until_step=query.until_step,
                last_step=job.step,
            )
            curve = _make_curve(points, query)
            self._curves.put(key, curve)
        return curve


def _column_names(metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the database's columns that hold these metrics."""
    return tuple(sorted({NESTED_METRICS.get(name.partition(".")[0], name) for name in metrics}))


def _make_curve(points: Sequence[Any], query: CurveQuery) -> Curve:
    names = ("step", "at", *_column_names(query.metrics))
    by_column = dict(zip(names, zip(*points, strict=True), strict=True)) if points else {}
    documents: dict[str, list[dict[str, Any]]] = {}
    values: dict[str, list[float | None]] = {}
    for name in query.metrics if points else ():
        family, _, nested_name = name.partition(".")
        if nested_name and family in NESTED_METRICS:
            if family not in documents:
                # one document of all points is parsed in a third of the time of one for each
                texts = ",".join(text or "{}" for text in by_column[NESTED_METRICS[family]])
                documents[family] = json.loads(f"[{texts}]")
            numbers: Iterable[float | None] = [document.get(nested_name) for document in documents[family]]
        else:
            numbers = by_column[name]
        # the difference is 0 for a number, and NaN, which is true, if the value is not finite
        column = [None if value is None or value - value else value for value in numbers]
        if column.count(None) < len(column):
            values[name] = column
    steps, times = by_column.get("step", ()), by_column.get("at", ())
    if not query.packed:
        return Curve.model_construct(step=steps, at=times, values={name: tuple(v) for name, v in values.items()})
    return Curve.model_construct(
        step=_pack("d", steps),
        at=_pack("d", times),
        values={
            name: _pack("f", [math.nan if number is None else number for number in v]) for name, v in values.items()
        },
    )


def _pack(kind: str, numbers: Iterable[float]) -> str:
    """Return base64 of the numbers, little-endian."""
    column = array(kind, numbers)
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode()


def _find_tokens_per_step(status: str) -> float | None:
    try:
        document = json.loads(status)
        return document["tokens"] / document["step"] or None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
