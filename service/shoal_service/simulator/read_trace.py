"""Reads job traces: CSV files with one job a line, with the throughputs in a column or in a file beside them.

| column | meaning |
|---|---|
| `submit_s` | seconds since the start of the trace; lines in any order |
| `work_samples` | samples to train |
| `min_workers`, `max_workers` | the bounds of its world size |
| `curve` | samples per second by world size: `1:100 2:190 4:350`; linear in between |
| `application`, `batch` | in place of `curve`: the key `application/batch` of NAME.curves.json |
| `job` | optional: its name |
| `asked_workers` | optional: what a rigid user asks for; default: `max_workers` |
| `priority`, `project` | optional; default: 0 and `default` |
| `restart_s` | optional: what each start and each change cost where the trace comes from |
| `cluster` | optional: the only cluster in which it may run; default: `any` |
| `wait_s` | optional: it starts elsewhere when its cluster was lost for so long; default: 1800 |

Measured curves fall here and there. A job with n workers may leave some of them idle, so it runs as fast as the best
world size up to n: curves are read that way.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path

from shoal_service.core.scheduling.market import DEFAULT_PROJECT, ThroughputCurve
from shoal_service.simulator.trace import WAIT_S, Trace, TraceJob
from shoal_workers.contract.placing import ANY_CLUSTER

_REQUIRED = ("submit_s", "work_samples", "min_workers", "max_workers")
_OPTIONAL = (
    "job",
    "asked_workers",
    "priority",
    "project",
    "restart_s",
    "cluster",
    "wait_s",
    "curve",
    "application",
    "batch",
)


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and column."""


def read_trace(path: Path) -> Trace:
    """Raises TraceError, and OSError if the file cannot be opened."""
    curves_path = path.with_name(f"{path.stem}.curves.json")
    curves = parse_curves(curves_path.read_text("utf-8"), curves_path.name) if curves_path.exists() else {}
    return parse_trace(path.read_text(encoding="utf-8"), path.name, curves)


def parse_trace(text: str, name: str, curves: Mapping[str, Mapping[int, float]] | None = None) -> Trace:
    """`name` for messages; `curves` by `application/batch`. Raises TraceError."""
    kept = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if not line.startswith("#")]
    rows = csv.DictReader(line for _, line in kept)
    columns = rows.fieldnames or []
    missing = [column for column in _REQUIRED if column not in columns]
    if "curve" not in columns and not {"application", "batch"} <= set(columns):
        missing.append("curve")
    if missing:
        raise TraceError(f"{name} has no column {missing[0]}. Its first line must name the columns.")
    unknown = [column for column in columns if column not in (*_REQUIRED, *_OPTIONAL)]
    if unknown:
        known = ", ".join((*_REQUIRED, *_OPTIONAL))
        raise TraceError(f"{name} has the unknown column {unknown[0]}. Known are {known}.")
    jobs: dict[str, TraceJob] = {}
    for number, fields in enumerate(rows, start=1):
        row = _Row(name, kept[rows.line_num - 1][0], fields)
        if None in fields:
            raise row.error(str(columns[-1]), f"there are more fields than the {len(columns)} columns")
        job = _job(row, number, curves or {})
        if job.job_id in jobs:
            raise row.error("job", f"{job.job_id!r} is the name of an earlier job, too")
        jobs[job.job_id] = job
    if not jobs:
        raise TraceError(f"{name} has no jobs.")
    return Trace(name, tuple(sorted(jobs.values(), key=lambda job: job.submit_s)))


def parse_curves(text: str, name: str) -> dict[str, dict[int, float]]:
    """The content of NAME.curves.json: application/batch -> workers -> samples per second. Raises TraceError."""
    try:
        read = {
            key: {int(workers): float(rate) for workers, rate in curve.items()}
            for key, curve in json.loads(text).items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        message = f'{name} must be JSON like {{"application/batch": {{"1": samples per second}}}}: {error}'
        raise TraceError(message) from error
    for key, curve in read.items():
        if not curve or min(curve) < 1 or min(curve.values()) <= 0 or math.inf in curve.values():
            raise TraceError(f"{name}: the curve {key} needs world sizes of 1 or more and rates above 0.")
    return read


class _Row:
    """One line, and the messages about it."""

    def __init__(self, name: str, line: int, fields: Mapping[str, str | None]) -> None:
        self._name, self._line, self._fields = name, line, fields

    def error(self, column: str, what: str) -> TraceError:
        return TraceError(f"{self._name}, line {self._line}, column {column}: {what}.")

    def text(self, column: str, default: str) -> str:
        return (self._fields.get(column) or "").strip() or default

    def number(self, column: str, *, least: float, default: float | None = None) -> float:
        text = self.text(column, "")
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"{text!r} is not a number") from None
        if not (math.isfinite(value) and value >= least):
            raise self.error(column, f"{text} must be {least:g} or more")
        return value

    def whole(self, column: str, *, least: float, default: float | None = None) -> int:
        value = self.number(column, least=least, default=default)
        if value != int(value):
            raise self.error(column, f"{value:g} is not a whole number")
        return int(value)


def _job(row: _Row, number: int, curves: Mapping[str, Mapping[int, float]]) -> TraceJob:
    least = row.whole("min_workers", least=1)
    most = row.whole("max_workers", least=least)
    asked = row.whole("asked_workers", least=least, default=most)
    if asked > most:
        raise row.error("asked_workers", f"{asked} is more than max_workers, {most}")
    work = row.number("work_samples", least=0)
    if not work:
        raise row.error("work_samples", "0 must be more than 0")
    cluster = row.text("cluster", ANY_CLUSTER)
    return TraceJob(
        job_id=row.text("job", f"job-{number}"),
        submit_s=row.number("submit_s", least=0),
        work=work,
        min_workers=least,
        max_workers=most,
        asked_workers=asked,
        curve=_usable(_measured(row, curves), most),
        priority=row.whole("priority", least=-math.inf, default=0),
        project=row.text("project", DEFAULT_PROJECT),
        restart_s=row.number("restart_s", least=0) if row.text("restart_s", "") else None,
        cluster="" if cluster == ANY_CLUSTER else cluster,
        wait_s=row.number("wait_s", least=0, default=WAIT_S),
    )


def _measured(row: _Row, curves: Mapping[str, Mapping[int, float]]) -> ThroughputCurve:
    text = row.text("curve", "")
    if text:
        points = _points(row, text)
    else:
        key = f"{row.text('application', '')}/{row.text('batch', '')}"
        if key not in curves:
            raise row.error("application", f"there is no curve {key!r} in the file of curves beside the trace")
        points = dict(curves[key])
    sizes = tuple(sorted(points))
    return ThroughputCurve(sizes, tuple(points[size] for size in sizes))


def _points(row: _Row, text: str) -> dict[int, float]:
    points: dict[int, float] = {}
    for word in text.split():
        size, _, rate = word.partition(":")
        try:
            points[int(size)] = float(rate)
        except ValueError:
            raise row.error("curve", f"{word!r} is not WORKERS:SAMPLES_PER_SECOND, such as 4:350") from None
    if min(points) < 1 or not all(0 < rate < math.inf for rate in points.values()):
        raise row.error("curve", f"{text!r} needs world sizes of 1 or more and rates above 0")
    return points


def _usable(curve: ThroughputCurve, most: int) -> ThroughputCurve:
    """The curve with the best rate up to each world size."""
    sizes = range(1, most + 1)
    best, rates = 0.0, []
    for size in sizes:
        best = max(best, curve.rate(size))
        rates.append(best)
    return ThroughputCurve(tuple(sizes), tuple(rates))
