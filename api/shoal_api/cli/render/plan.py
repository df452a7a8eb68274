"""The pages of `shoal plan`, `shoal profile` and `shoal simulate`, and the JSON document of the last. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from shoal_api.cli.render.terminal import make_table
from shoal_service.control.planning import PlanAnswer
from shoal_service.core.hardware_profile import GIB, LinkClass
from shoal_service.core.layout_plan import HostNeed
from shoal_service.core.quantities import count_text
from shoal_service.planner import HardwareProfile, Prediction
from shoal_service.planner.memory import BytesPart
from shoal_service.planner.ranking import StepCorrection
from shoal_service.planner.step_time import SecondsPart
from shoal_service.simulator.engine import JobRun, Market, SimulationResult
from shoal_service.simulator.metrics import Metrics
from shoal_service.simulator.traces import AWAY, Capacity, Trace

_SHORT_BYTES = {
    BytesPart.PARAMETERS: "par",
    BytesPart.OPTIMIZER: "opt",
    BytesPart.GRADIENTS: "grad",
    BytesPart.GATHERED: "gath",
    BytesPart.ACTIVATIONS: "act",
    BytesPart.LOGITS: "log",
    BytesPart.EXCHANGE: "exch",
    BytesPart.SNAPSHOTS: "snap",
    BytesPart.RESERVED: "res",
}
_SHORT_AXES = {"dp_shard": "fsdp", "dp_replicate": "dp"}
_SHORT_LINKS = {
    LinkClass.INSIDE_NODE: "in nodes",
    LinkClass.BETWEEN_NODES: "across nodes",
    LinkClass.BETWEEN_RACKS: "across racks",
}
_LEAST_SHARE = 0.01
"""Parts below this share of the step are left out."""


def render_plan(answer: PlanAnswer) -> list[Any]:
    ranking, choice = answer.ranking, answer.choice
    lines: list[Any] = [_head(answer)]
    if ranking.predictions:
        lines += [_summary(answer), _table(ranking.predictions)]
    if ranking.correction is not None:
        lines.append(_correction(ranking.correction))
    if ranking.note:
        lines.append(Text(ranking.note, style="yellow"))
    if ranking.compared is not None:
        lines.append(_comparison(ranking.predictions[0], ranking.compared))
    lines += [Text(f"the engine refuses it: {reason}", style="yellow") for reason in ranking.compared_refused]
    chosen = Text.assemble("choice: ", (choice.name, "bold"))
    if choice.num_idle:
        chosen.append(f", {choice.num_idle} of {count_text(ranking.world_size, 'rank')} idle", style="yellow")
    lines.append(chosen)
    lines += [Text(f"  {reason}", style="dim") for reason in choice.reason.split("; ")]
    if choice.host.alone:
        lines.append(_host(choice.host))
    lines += [Text(f"why not {line}", style="dim") for line in ranking.why_not]
    return [*lines, *(Text(hint) for hint in ranking.hints)]


def _comparison(best: Prediction, compared: Prediction) -> Any:
    """Seconds and GiB of two layouts by part; parts that are small in both are left out."""
    seconds = [(f"{part}, s", best.seconds[part], compared.seconds[part], best.step_s) for part in SecondsPart]
    sizes = [
        (f"{part}, GiB", best.bytes[part] / GIB, compared.bytes[part] / GIB, best.memory_bytes / GIB)
        for part in BytesPart
    ]
    rows = [
        (name, f"{of_best:.3g}", f"{other:.3g}", f"{other - of_best:+.3g}")
        for name, of_best, other, total in (*seconds, *sizes)
        if max(of_best, other) >= _LEAST_SHARE * total
    ]
    totals = [
        ("step, s", f"{best.step_s:.3g}", f"{compared.step_s:.3g}", f"{compared.step_s / best.step_s - 1:+.0%}"),
        (
            "memory, GiB",
            *(f"{p.memory_bytes / GIB:.1f}" for p in (best, compared)),
            "" if compared.fits else "too large",
        ),
        ("shard, recompute", *(f"{p.layout.shard}, {p.layout.recompute}" for p in (best, compared)), ""),
    ]
    return make_table(("", f">{best.name}", f">{compared.name}", ">difference"), [*totals, *rows])


def render_hardware_profile(profile: HardwareProfile, path: str) -> list[Any]:
    rates = profile.peak_flops.items()
    latencies = sorted(profile.inside.latency_s.items())
    rows = [
        *(
            (f"{precision} matrix products", f"{rate * profile.matmul_efficiency / 1e9:,.1f} GFLOP/s")
            for precision, rate in rates
        ),
        ("memory", f"{profile.memory_bytes / GIB:,.1f} GiB"),
        ("element-wise", f"{profile.memory_bandwidth / 1e9:,.1f} GB/s"),
        ("between workers", f"{profile.inside.bandwidth / 1e9:,.2f} GB/s"),
        *((f"collective of {count_text(size, 'rank')}", f"{1e3 * time_s:,.3f} ms") for size, time_s in latencies),
    ]
    return [Text.assemble((profile.name, "bold"), f"  {path}"), make_table(("quantity", ">measured"), rows)]


def _host(need: HostNeed) -> Text:
    parts = {"process": need.process, "training": need.training, "snapshots": need.snapshots}
    if need.build:
        parts["the whole model while it is built"] = need.build
    text = f"host memory of a worker: {need.alone / GIB:.2f} GiB ("
    text += ", ".join(f"{use} {size / GIB:.2f}" for use, size in parts.items() if size) + ")"
    if copies := need.sent + need.kept:
        text += f"; on several machines up to {copies / GIB:.2f} GiB more for copies"
    return Text(text)


def _head(answer: PlanAnswer) -> Text:
    ranking = answer.ranking
    text = Text.assemble((answer.name, "bold"), f"  {ranking.world_size:,} ranks of {ranking.profile}")
    if ranking.num_params:
        text.append(f", {ranking.num_params / 1e9:,.3g} B parameters")
    if ranking.num_active_params != ranking.num_params:
        text.append(f" ({ranking.num_active_params / 1e9:,.3g} B active)")
    if 0 < ranking.num_trained_params != ranking.num_params:
        text.append(f", {ranking.num_trained_params / 1e6:,.3g} M of them trained")
    if ranking.num_trained_params and f"{ranking.state_bytes:.3g}" != "8":
        text.append(f", {ranking.state_bytes:.3g} bytes of optimizer state for each")
    batch = f", {answer.num_micro_batches:,} micro-batches of {answer.micro_size} a step"
    text.append(batch + (f" = {answer.tokens_per_step:,} tokens" if answer.tokens_per_step else ""))
    return text


def _summary(answer: PlanAnswer) -> Text:
    ranking = answer.ranking
    return Text(
        f"{ranking.num_layouts:,} legal layouts, {ranking.num_fitting:,} fit into {ranking.usable_bytes / GIB:,.1f} "
        "GiB. The best layout of each combination of degrees:",
        style="dim",
    )


def _correction(correction: StepCorrection) -> Text:
    error = f"error bar of a step: {correction.error:.0%} (80 % of runs)"
    if not correction.num_jobs:
        return Text(f"{error}; no job on this hardware has been measured", style="dim")
    jobs = count_text(correction.num_jobs, "job")
    return Text(
        f"{error}, from {jobs} on this hardware, whose steps took {correction.factor:.2f} of the prediction", "dim"
    )


def _table(predictions: tuple[Prediction, ...]) -> Any:
    return make_table(
        (
            "layout",
            "shard",
            "schedule",
            "recompute",
            "links",
            ">micro",
            ">GiB",
            "of which",
            ">step s",
            ">tokens/s",
            ">MFU",
            ">bubble",
            "the rest of the step",
        ),
        [
            (
                p.name,
                p.layout.shard if p.layout.num_shards > 1 else "-",
                f"{p.layout.schedule}/{len(p.layout.stages)}" if p.layout.pp > 1 else "-",
                p.layout.recompute,
                _links(p),
                p.micro_batches_per_rank,
                Text(f"{p.memory_bytes / GIB:.1f}", style="" if p.fits else "red"),
                Text(_bytes(p), style="dim"),
                f"{p.step_s:.3g}",
                f"{p.tokens_per_s:,.0f}",
                f"{p.mfu:.1%}",
                f"{p.bubble:.1%}" if p.layout.pp > 1 else "-",
                Text(_seconds(p), style="dim"),
            )
            for p in predictions
        ],
    )


def _links(prediction: Prediction) -> str:
    """The axes by the class of links that their groups use, for example `tp in nodes, pp fsdp across nodes`."""
    axes: dict[LinkClass, list[str]] = {}
    for axis, link in prediction.links.items():
        axes.setdefault(link, []).append(_SHORT_AXES.get(axis, axis))
    return ", ".join(f"{' '.join(axes[link])} {_SHORT_LINKS[link]}" for link in LinkClass if link in axes) or "-"


def _bytes(prediction: Prediction) -> str:
    largest = sorted(prediction.bytes.items(), key=lambda item: -item[1])
    large = [(part, size) for part, size in largest if size >= 5 * _LEAST_SHARE * prediction.memory_bytes]
    return " ".join(f"{_SHORT_BYTES[part]} {size / GIB:.1f}" for part, size in large)


def _seconds(prediction: Prediction) -> str:
    largest = sorted(prediction.seconds.items(), key=lambda item: -item[1])
    large = [
        (part, share)
        for part, seconds in largest
        if part not in (SecondsPart.COMPUTE, SecondsPart.BUBBLE)
        and (share := seconds / prediction.step_s) >= _LEAST_SHARE
    ]
    return " ".join(f"{part} {share:.0%}" for part, share in large)


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
    lines: list[Any] = [_simulation_head(trace, market, unit, restart_costs=restart_costs), table]
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


def _simulation_head(trace: Trace, market: Market, unit: str, *, restart_costs: bool) -> Text:
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
        f"{result.policy} never starts {metrics.num_unfinished} of "
        f"{count_text(metrics.num_jobs, 'job')}, first {waiting[0]}. Its figures are those of the "
        "others.",
        style="red",
    )


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def _finite(value: float) -> float | None:
    """Return None for a value that is not finite, because JSON has no NaN."""
    return value if math.isfinite(value) else None
