"""The page of `shoal top`: the cluster in one line, then every job that goes on. Pure; the command asks and repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.sparkline import worker_bar
from shoal_api.cli.render.tables import STATE_STYLE, clock, in_several_clusters, new_table, number
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.fleet_views import ClusterView
from shoal_service.views import JobSummary
from shoal_workers.contract.job import JobState

_ORDER = (
    JobState.RECOVERING,
    JobState.WAITING,
    JobState.RUNNING,
    JobState.RESIZING,
    JobState.STARTING,
    JobState.PAUSING,
    JobState.CANCELLING,
    JobState.PAUSED,
    JobState.QUEUED,
)
"""What needs attention first."""
_NUM_HEAD_LINES = 6
_WIDE = 150
_LINES_IF_NARROW = 3


def top_page(jobs: Sequence[JobSummary], cluster: ClusterView, now: float, max_rows: int = 50) -> RenderableType:
    """`jobs`: those that have not ended."""
    rows = sorted(jobs, key=lambda job: (_ORDER.index(job.state), job.queue_position or 0, -job.created_at))
    page: list[RenderableType] = [_head(jobs, cluster, now), Text("")]
    page.append(_table(rows[:max_rows], now) if rows else Text("no job goes on; `shoal submit SPEC` starts one"))
    if len(rows) > max_rows:
        page.append(Text(f"and {count_text(len(rows) - max_rows, 'more job')}", style="dim"))
    return Group(*page)


def rows_that_fit(width: int, height: int) -> int:
    """Jobs that a screen shows below the head; on a narrow one a job takes several lines."""
    return max(1, (height - _NUM_HEAD_LINES) // (1 if width >= _WIDE else _LINES_IF_NARROW))


def _head(jobs: Sequence[JobSummary], cluster: ClusterView, now: float) -> Text:
    alive = [node for node in cluster.nodes if node.alive]
    counts = Counter(job.state for job in jobs)
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    head = Text.assemble((clock(now), "bold"), f"  {states or 'no jobs'}")
    head.append(f"\nworkers {sum(job.workers for job in jobs)}/{sum(job.desired_workers for job in jobs)}")
    head.append(f"   goodput {_share(fleet_goodput(jobs))}")
    head.append(f"   {count_text(sum(job.incidents for job in jobs), 'incident')}")
    head.append(f"   {count_text(len(alive), 'node')}, {cluster.cpus_free:g} of {cluster.cpus_total:g} CPUs free")
    if cluster.gpus_total:
        head.append(f", {cluster.gpus_free:g} of {cluster.gpus_total:g} GPUs free")
    away = [one.name for one in cluster.clusters if not one.connected]
    if away and cluster.connected:
        head.append(f"   {'cluster' if len(away) == 1 else 'clusters'} {', '.join(away)} away", style="red")
    if not cluster.connected:
        head.append("   the Ray cluster is not connected", style="red")
    elif len(alive) < len(cluster.nodes):
        head.append(f"   {count_text(len(cluster.nodes) - len(alive), 'node')} dead", style="red")
    return head


def fleet_goodput(jobs: Sequence[JobSummary]) -> float | None:
    """The goodput of the jobs that hold workers, weighted with the workers that they may have. None: there are none."""
    known = [(job.goodput, job.desired_workers) for job in jobs if job.goodput is not None and job.desired_workers]
    total = sum(workers for _, workers in known)
    return sum(ratio * workers for ratio, workers in known) / total if total else None


def _table(jobs: Sequence[JobSummary], now: float) -> Table:
    several = in_several_clusters(jobs)
    where = ("cluster",) if several else ()
    table = new_table(
        *(
            "job",
            "name",
            *where,
            "state",
            ">step",
            ">ETA",
            ">loss",
            ">tokens/s",
            "workers",
            ">goodput",
            ">incidents",
            "now",
        )
    )
    for job in jobs:
        step = f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step)
        place = f"#{job.queue_position}" if job.queue_position is not None else ""
        is_whole = job.workers >= job.desired_workers
        table.add_row(
            job.id,
            job.name,
            *((job.cluster or "-",) if several else ()),
            Text(job.state, style=STATE_STYLE[job.state]),
            step,
            duration_text(job.eta_s) if job.eta_s is not None else "-",
            number(job.loss),
            number(job.tokens_per_s, 0),
            Text(worker_bar(job.workers, job.desired_workers), style="green" if is_whole else "yellow"),
            _share(job.goodput),
            Text(str(job.incidents), style="red" if job.incidents else "dim"),
            Text(place or job.note or job.reason, style="dim"),
        )
    return table


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
