"""What a simulation is played on: a trace of jobs, the nodes over time, and projects; and the files that hold them.

Every reader checks its file and raises TraceError, whose message names the file and the line or the setting.
docs/simulation.md explains the files to users.
"""

from __future__ import annotations

import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_service.core.scheduling.market import (
    DEFAULT_PROJECT,
    ClusterState,
    MarketNode,
    Project,
    ThroughputCurve,
    WorkerNeed,
)
from shoal_workers.contract import ANY_CLUSTER, CLUSTER_PATTERN

WAIT_S = 1800.0
"""The default of `elasticity.wait_s`."""
WORKER = WorkerNeed(cpus=1.0)
"""What each worker of a simulation reserves; a node of `workers_per_node` workers has that many CPUs."""
AWAY = -1
"""Stands in place of a number of nodes: the whole cluster is lost. It does not answer, and its jobs stand still."""
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
_UNITS_S = {"at_h": 3600.0, "at_s": 1.0}
_COUNTS = ("guaranteed", "limit", "max_running", "max_queued")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job. Times are seconds since the start of the trace."""

    job_id: str
    submit_s: float
    work: float
    """Samples to train; positive."""
    min_workers: int
    max_workers: int
    asked_workers: int
    """What a rigid user asks for; only policies without elasticity read it."""
    curve: ThroughputCurve
    priority: int = 0
    project: str = DEFAULT_PROJECT
    restart_s: float | None = None
    """What each start and each change of the number of workers cost in the system that the trace was measured on."""
    cluster: str = ""
    """The only one of several clusters in which it may run; empty: any."""
    wait_s: float = WAIT_S
    """If its cluster is lost for this long, it starts in another one."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in the order of their submission."""

    name: str
    jobs: tuple[TraceJob, ...]


@dataclass(frozen=True, slots=True)
class ClusterCapacity:
    """One of several clusters over time."""

    name: str
    steps: tuple[tuple[float, int], ...]
    """(seconds since the start, nodes alive from then on, or AWAY): rising."""

    def at(self, at_s: float) -> int:
        """Nodes, or AWAY; none before the first step."""
        step = bisect_right(self.steps, (at_s, math.inf)) - 1
        return self.steps[step][1] if step >= 0 else 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Nodes over time. The nodes with the highest numbers leave first."""

    workers_per_node: int
    steps: tuple[tuple[float, int], ...]
    """(seconds since the start, nodes alive from then on): rising, the first at 0. Of several clusters, their sum."""
    clusters: tuple[ClusterCapacity, ...] = ()
    """The clusters, ordered by name. Empty: there is one cluster, without a name."""

    def __post_init__(self) -> None:
        assert self.workers_per_node >= 1 and self.steps and self.steps[0][0] == 0
        assert all(a[0] < b[0] for a, b in zip(self.steps, self.steps[1:], strict=False))

    @staticmethod
    def constant(nodes: int, workers_per_node: int) -> Capacity:
        return Capacity(workers_per_node, ((0.0, nodes),))

    @staticmethod
    def of_clusters(clusters: Mapping[str, Sequence[tuple[float, int]]], workers_per_node: int) -> Capacity:
        """`clusters`: the steps of each one."""
        capacities = tuple(ClusterCapacity(name, tuple(clusters[name])) for name in sorted(clusters))
        times = sorted({0.0, *(at for cluster in capacities for at, _ in cluster.steps)})
        total = tuple((at, sum(max(0, cluster.at(at)) for cluster in capacities)) for at in times)
        return Capacity(workers_per_node, total, capacities)

    def workers_by_cluster(self, step: int) -> dict[str, int]:
        """The number of workers that fit into each cluster from the step of this index on; none where it is lost."""
        if not self.clusters:
            return {"": self.workers(step)}
        return {
            cluster.name: max(0, cluster.at(self.steps[step][0])) * self.workers_per_node for cluster in self.clusters
        }

    def states(self, step: int) -> dict[str, ClusterState]:
        """States of the clusters that have names."""
        return {
            cluster.name: ClusterState.AWAY if cluster.at(self.steps[step][0]) == AWAY else ClusterState.OPEN
            for cluster in self.clusters
        }

    def workers(self, step: int) -> int:
        """The number of workers that fit from the step of this index on."""
        return self.steps[step][1] * self.workers_per_node

    def nodes(self, step: int) -> tuple[MarketNode, ...]:
        at, total = self.steps[step]
        parts = [(f"{cluster.name}-", cluster.name, max(0, cluster.at(at))) for cluster in self.clusters] or [
            ("", "", total)
        ]
        return tuple(
            MarketNode(node_id=f"{prefix}node-{number:05d}", cpus=float(self.workers_per_node), cluster=name)
            for prefix, name, nodes in parts
            for number in range(nodes)
        )

    def worker_seconds(self, start_s: float, end_s: float) -> float:
        """Integral of the workers over an interval."""
        ends = [at for at, _ in self.steps[1:]] + [end_s]
        return sum(
            max(0.0, min(end, end_s) - max(at, start_s)) * nodes * self.workers_per_node
            for (at, nodes), end in zip(self.steps, ends, strict=True)
        )


class TraceError(ValueError):
    """A trace, the nodes or the projects cannot be read; the message names the file, and the line or the setting."""


def read_trace(path: Path) -> Trace:
    """A CSV file with one job a line, with the throughputs in a column or in a file beside it.

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

    Raises TraceError, and OSError if the file cannot be opened.
    """
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
        job = _read_job(row, number, curves or {})
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


def _read_job(row: _Row, number: int, curves: Mapping[str, Mapping[int, float]]) -> TraceJob:
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
        curve=_make_usable(_read_curve(row, curves), most),
        priority=row.whole("priority", least=-math.inf, default=0),
        project=row.text("project", DEFAULT_PROJECT),
        restart_s=row.number("restart_s", least=0) if row.text("restart_s", "") else None,
        cluster="" if cluster == ANY_CLUSTER else cluster,
        wait_s=row.number("wait_s", least=0, default=WAIT_S),
    )


def _read_curve(row: _Row, curves: Mapping[str, Mapping[int, float]]) -> ThroughputCurve:
    text = row.text("curve", "")
    if text:
        points = _parse_points(row, text)
    else:
        key = f"{row.text('application', '')}/{row.text('batch', '')}"
        if key not in curves:
            raise row.error("application", f"there is no curve {key!r} in the file of curves beside the trace")
        points = dict(curves[key])
    sizes = tuple(sorted(points))
    return ThroughputCurve(sizes, tuple(points[size] for size in sizes))


def _parse_points(row: _Row, text: str) -> dict[int, float]:
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


def _make_usable(curve: ThroughputCurve, most: int) -> ThroughputCurve:
    """The curve with the best rate up to each world size.

    Measured curves fall here and there. A job with n workers may leave some of them idle, so it runs as fast as the
    best world size up to n.
    """
    sizes = range(1, most + 1)
    best, rates = 0.0, []
    for size in sizes:
        best = max(best, curve.rate(size))
        rates.append(best)
    return ThroughputCurve(tuple(sizes), tuple(rates))


def read_capacity(path: Path, workers_per_node: int) -> Capacity:
    """A CSV file with the number of nodes that are alive from when on.

        # at_h,nodes      hours since the start, the nodes alive from then on; `at_s` for seconds
        0.000,9
        0.181,16

    With several clusters, each line is of one of them, and `away` in place of a number loses all of it until its next
    line:

        at_h,cluster,nodes
        0,east,4
        0,west,2
        1.5,west,away

    The line that names the columns may be a comment. Of several lines with the same time the last one holds. Before the
    first line (of a cluster) there are no nodes; after the last one nothing changes.

    Raises TraceError, and OSError if the file cannot be opened.
    """
    return parse_capacity(path.read_text(encoding="utf-8"), path.name, workers_per_node)


def parse_capacity(text: str, name: str, workers_per_node: int) -> Capacity:
    """`name` for messages. Raises TraceError."""
    unit_s: float | None = None
    has_clusters = False
    steps: dict[str, dict[float, int]] = {}
    latest = 0.0
    for number, line in enumerate(text.splitlines(), start=1):
        names = [word.strip() for word in line.lstrip("# ").split(",")]
        header = _UNITS_S.get(names[0])
        if header is not None and unit_s is None:
            unit_s, has_clusters = header, names[1:2] == ["cluster"]
            continue
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{name}, line {number}"
        if unit_s is None:
            raise TraceError(
                f"{where}: a line before this one must name the columns: at_h,nodes or at_h,cluster,nodes."
            )
        cluster = _take_cluster(names, where) if has_clusters else ""
        at_s, nodes = _parse_step(names, unit_s, where, has_clusters=has_clusters)
        if at_s < latest:
            raise TraceError(f"{where}: the time {names[0]} is before that of the line above.")
        latest = at_s
        steps.setdefault(cluster, {0.0: 0})[at_s] = nodes
    if not steps:
        raise TraceError(f"{name} has no lines.")
    changes = {cluster: _list_changes(capacity_steps) for cluster, capacity_steps in steps.items()}
    return Capacity.of_clusters(changes, workers_per_node) if has_clusters else Capacity(workers_per_node, changes[""])


def _list_changes(steps: Mapping[float, int]) -> tuple[tuple[float, int], ...]:
    changes = list(steps.items())
    return tuple(step for before, step in zip([(0.0, None), *changes], changes, strict=False) if before[1] != step[1])


def _take_cluster(columns: list[str], where: str) -> str:
    """Takes the name out of the words."""
    if len(columns) != 3 or not re.match(CLUSTER_PATTERN, columns[1]):
        raise TraceError(
            f"{where}: {','.join(columns)!r} is not a time, the name of a cluster (lower-case letters, digits and -), "
            "and a number of nodes or away."
        )
    return columns.pop(1)


def _parse_step(columns: list[str], unit_s: float, where: str, *, has_clusters: bool) -> tuple[float, int]:
    if len(columns) != 2:
        raise TraceError(f"{where}: there are {len(columns)} columns in place of 2, a time and a number of nodes.")
    is_away = has_clusters and columns[1] == "away"
    try:
        at_s, nodes = float(columns[0]) * unit_s, 0.0 if is_away else float(columns[1])
    except ValueError:
        raise TraceError(f"{where}: {','.join(columns)!r} is not a time and a number of nodes.") from None
    if not (0 <= at_s < math.inf and nodes >= 0 and nodes == int(nodes)):
        raise TraceError(f"{where}: {','.join(columns)!r} needs a time and a whole number of nodes, both 0 or more.")
    return at_s, AWAY if is_away else int(nodes)


def parse_projects(document: object, source: str) -> dict[str, Project]:
    """The projects of a decoded YAML or JSON document, by name.

        vision: {weight: 2, guaranteed: 8}
        speech: {limit: 16, parent: research}

    `source` for messages. Raises TraceError.
    """
    if not isinstance(document, dict):
        raise TraceError(f"{source} must have one key for each project, such as: vision: {{weight: 2, guaranteed: 8}}.")
    projects = {str(name): _parse_project(str(name), fields, source) for name, fields in document.items()}
    for project in projects.values():
        if project.parent is not None and project.parent not in projects:
            raise TraceError(f"{source}, project {project.name}: its parent {project.parent!r} is not in the file.")
    return projects


def _parse_project(name: str, fields: object, source: str) -> Project:
    where = f"{source}, project {name}"
    fields = {} if fields is None else fields
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {fields!r} is not a mapping of settings.")
    known = ("parent", "weight", *_COUNTS)
    given: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in known:
            raise TraceError(f"{where}: the setting {key!r} is unknown. Known are {', '.join(known)}.")
        if key in _COUNTS and not (isinstance(value, int) and value >= 0):
            raise TraceError(f"{where}: {key} is {value!r} and must be a whole number, 0 or more.")
        if key == "weight" and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise TraceError(f"{where}: weight is {value!r} and must be a number above 0.")
        given[key] = value
    return Project(name=name, **given)
