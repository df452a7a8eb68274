"""A panel and its queries. Pure data; a test evaluates every query against a Prometheus that scraped a real run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Look(StrEnum):
    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    """With labels in double braces."""
    needs: str = ""
    """What a cluster must have for this query to return anything; empty: every job has it."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """A unit of Grafana: s, percentunit, bytes ..."""
    look: Look = Look.LINES
    help: str = ""
    is_log: bool = False
    """A logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    rows: dict[str, tuple[Panel, ...]]
    """Panels by the title of their row."""
    has_job: bool = False
    """It has the variable `job`: the id of the job that is shown."""


INTERVAL = "$__rate_interval"
NAMED = "on (job_id) group_left (name) max by (job_id, name) (shoal_job_info)"


def one(title: str, expr: str, legend: str = "", unit: str = "short", **options: object) -> Panel:
    """A panel with one query."""
    return Panel(title, (Query(expr, legend),), unit, **options)  # type: ignore[arg-type]


def by_job(title: str, metric: str, unit: str = "short", **options: object) -> Panel:
    """A metric of all jobs, each with its name. Several control planes show the same series; one is taken."""
    return one(title, f"max by (job_id) ({metric}) * {NAMED}", "{{name}} {{job_id}}", unit, **options)


def quantiles(metric: str, by: str = "", where: str = "", legend: str = "") -> tuple[Query, ...]:
    """Median and 95 % of a histogram that all control planes show. `by`: a label to keep; `where`: a selector.

    Buckets are added up, never compared: the maxima of buckets of several causes are no histogram. The control planes
    show the same series, so one of their quantiles is taken.
    """
    kept, labels = (f" by ({by})", f"{by}, instance, le") if by else ("", "instance, le")
    buckets = f"sum by ({labels}) (increase({metric}_bucket{where}[{INTERVAL}]))"
    return tuple(
        Query(f"max{kept} (histogram_quantile({share}, {buckets}))", f"{legend} {words}".strip())
        for share, words in ((0.5, "median"), (0.95, "95 %"))
    )
