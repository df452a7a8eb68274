"""The page and the JSON document of `shoal simulate`. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from shoal_api.cli.render.terminal import make_table
from shoal_service.core.quantities import count_text
from shoal_service.simulator.engine import JobRun, Market, SimulationResult
from shoal_service.simulator.metrics import Metrics
from shoal_service.simulator.traces import AWAY, Capacity, Trace

_COLUMNS = ("mean JCT", "median", "p99", "makespan", "fairness", "utilisation", "goodput", "moves", "preempted")
_LEAST_HOURS = 5.0
"""Times of a simulation that takes less than this are in minutes."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One policy on one trace."""

    policy: str
    run: SimulationResult
    metrics: Metrics


def render_simulation(trace: Trace, market: Market, results: Sequence[Simulated], *, restart_costs: bool) -> list[Any]:
    longest_h = max(filter(math.isfinite, (result.metrics.makespan_h for result in results)), default=0.0)
    unit, per_hour, digits = ("hours", 1, 3) if longest_h >= _LEAST_HOURS else ("minutes", 60, 1)
    best = min((result.metrics.mean_jct_h for result in results if not result.metrics.num_unfinished), default=math.nan)
    rows = []
    for result in results:
        metrics = result.metrics
        is_best = metrics.mean_jct_h == best and len(results) > 1
        times = (metrics.mean_jct_h, metrics.median_jct_h, metrics.p99_jct_h, metrics.makespan_h)
        mean, *others = (_number(hours * per_hour, digits) for hours in times)
        rows.append(
            (
                Text(result.policy, style="bold" if is_best else ""),
                Text(mean, style="bold green" if is_best else ""),
                *others,
                _number(metrics.fairness, 3),
                f"{metrics.utilisation:.1%}",
                f"{metrics.goodput:.1%}" if math.isfinite(metrics.goodput) else "-",
                f"{metrics.num_moves:,}",
                f"{metrics.num_preemptions:,}",
            )
        )
    table = make_table(("policy", *(f">{name}" for name in _COLUMNS)), rows)
    lines: list[Any] = [_head(trace, market, unit, restart_costs=restart_costs), table]
    lines += [_unfinished(result) for result in results if result.metrics.num_unfinished]
    return lines


def documents(trace: Trace, market: Market, results: Sequence[Simulated]) -> dict[str, Any]:
    """Return what `--json` prints: everything of the table, and the history of each job."""
    return {
        "trace": trace.name,
        "num_jobs": len(trace.jobs),
        "capacity": [[at_s, nodes * market.capacity.workers_per_node] for at_s, nodes in market.capacity.steps],
        **_clusters(market.capacity),
        "switch_s": market.costs.switch_s,
        "start_s": market.costs.start_s,
        "policies": [
            {
                "policy": result.policy,
                **{name: _finite(value) for name, value in asdict(result.metrics).items()},
                "jobs": [_job(run) for run in result.run.jobs],
            }
            for result in results
        ],
    }


def _clusters(capacity: Capacity) -> dict[str, Any]:
    """Return the workers of each cluster over time, null while it is lost; nothing if there is only one."""
    size = capacity.workers_per_node
    clusters = {
        cluster.name: [[at_s, None if nodes == AWAY else nodes * size] for at_s, nodes in cluster.steps]
        for cluster in capacity.clusters
    }
    return {"clusters": clusters} if clusters else {}


def _job(run: JobRun) -> dict[str, Any]:
    places = {"num_losses": run.num_losses, "clusters": run.cluster_starts} if run.cluster_starts else {}
    return {
        "job": run.job.job_id,
        "project": run.job.project,
        "submit_s": run.job.submit_s,
        "started_s": run.started_at,
        "finished_s": run.finished_at,
        "num_moves": run.num_moves,
        "num_preemptions": run.num_preemptions,
        "workers": run.history,
        **places,
    }


def _head(trace: Trace, market: Market, unit: str, *, restart_costs: bool) -> Text:
    capacity = market.capacity
    nodes = [nodes for _, nodes in capacity.steps]
    size = str(nodes[0]) if len(nodes) == 1 else f"{min(nodes)} to {max(nodes)}"
    cluster = f"{size} nodes of {count_text(capacity.workers_per_node, 'worker')}"
    if capacity.clusters:
        cluster += f" in {count_text(len(capacity.clusters), 'cluster')}"
    costs = f"a move costs {market.costs.switch_s:g} s, a start {market.costs.start_s:g} s"
    if restart_costs:
        costs = f"a move or start costs the trace's restart_s; otherwise {costs}"
    return Text.assemble(
        (trace.name, "bold"),
        f"  {count_text(len(trace.jobs), 'job')}, {cluster}, {costs}; times in {unit}",
    )


def _unfinished(result: Simulated) -> Text:
    metrics = result.metrics
    waiting = [run.job.job_id for run in result.run.jobs if run.finished_at is None]
    return Text(
        f"{result.policy} leaves {metrics.num_unfinished} of {count_text(metrics.num_jobs, 'job')} waiting for ever, "
        f"the first is {waiting[0]}. Its figures are those of the others.",
        style="red",
    )


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def _finite(value: float) -> float | None:
    """Return None for a value that is not finite, because JSON has no NaN."""
    return value if math.isfinite(value) else None
