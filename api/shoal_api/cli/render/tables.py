"""Resources of the API as tables and pages for a terminal. Pure: takes views, returns objects that rich prints."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.sparkline import sparkline, worker_bar
from shoal_service.core.quantities import count_text, duration_text, size_text
from shoal_service.views import (
    CheckpointState,
    CheckpointView,
    ClusterView,
    JobSummary,
    JobView,
    NodeView,
    SeriesPoint,
    WorkerView,
)
from shoal_workers.contract.job import JobState

STATE_STYLE = {
    JobState.QUEUED: "dim",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "bold green",
    JobState.RECOVERING: "bold yellow",
    JobState.RESIZING: "yellow",
    JobState.WAITING: "yellow",
    JobState.PAUSING: "dim",
    JobState.PAUSED: "dim",
    JobState.CANCELLING: "dim",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "red",
}
_CHECKPOINT_STYLE = {
    CheckpointState.COMMITTED: "green",
    CheckpointState.DAMAGED: "red",
    CheckpointState.DELETED: "dim",
    CheckpointState.FAILED: "red",
}
_SPARKLINE_WIDTH = 40


def jobs_table(jobs: Sequence[JobSummary], now: float) -> Table | Text:
    if not jobs:
        return Text("no jobs; `shoal submit SPEC` creates one", style="dim")
    table = new_table("id", "name", "state", ">step", ">loss", ">workers", ">age")
    for job in jobs:
        state = Text(job.state, style=STATE_STYLE[job.state])
        if job.reason:
            state.append(f" {job.reason}", style="dim")
        step = f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step)
        workers = f"{job.workers}/{job.desired_workers}" if job.desired_workers else "-"
        table.add_row(job.id, job.name, state, step, number(job.loss), workers, duration_text(now - job.created_at))
    return table


def job_page(job: JobView, series: Sequence[SeriesPoint]) -> Table:
    """The page of `shoal show`."""
    status = job.status
    state = Text(status.state, style=STATE_STYLE[status.state])
    if status.reason:
        state.append(f" {status.reason}", style="dim")
    rows: list[tuple[str, Any]] = [
        ("id", job.id),
        ("name", job.name),
        ("state", state),
        ("message", status.message),
        ("note", status.note),
        (
            "workers",
            worker_bar(status.workers, status.desired_workers)
            + f"  (min {job.spec.elasticity.min_workers}, max {job.spec.elasticity.max_workers})",
        ),
        ("layout", status.layout),
        ("step", f"{status.step}" + (f" of {status.total_steps}" if status.total_steps else "")),
        (
            "loss",
            f"{number(status.loss)}  {sparkline([point.loss for point in series], _SPARKLINE_WIDTH)}".rstrip()
            if status.loss is not None
            else "",
        ),
        ("validation", _validation(job)),
        ("tokens/s", number(status.tokens_per_s, 0) if status.tokens_per_s is not None else ""),
        ("tokens", f"{status.tokens:,}" if status.tokens else ""),
        ("parameters", f"{status.num_parameters:,}" if status.num_parameters else ""),
        ("ETA", duration_text(status.eta_s) if status.eta_s is not None and not status.state.ended else ""),
        ("checkpoint", _checkpoint(job)),
        ("snapshots", _snapshots(job)),
        ("a lost node", _node_loss(job)),
        ("incidents", f"{status.incidents}, {status.steps_lost} steps lost" if status.incidents else ""),
        ("goodput", _goodput(job)),
        ("attempt", f"{status.attempt}, generation {status.generation}" if status.attempt else ""),
        ("created", clock(job.created_at)),
        ("started", clock(job.started_at) if job.started_at else ""),
        ("ended", clock(job.ended_at) if job.ended_at else ""),
    ]
    page = Table.grid(padding=(0, 2))
    page.add_column(style="dim")
    page.add_column(overflow="fold")
    for label, value in rows:
        if str(value):
            page.add_row(label, value if isinstance(value, Text) else Text(str(value)))
    if status.failure is not None:
        ranks = ", ".join(str(rank) for rank in status.failure.ranks)
        page.add_row("failure", Text(f"{status.failure.type}: {status.failure.message}", style="red"))
        page.add_row("", Text(f"in {status.failure.phase}, step {status.failure.step}, rank {ranks}", style="dim"))
        page.add_row("", Text(status.failure.traceback.rstrip()))
    return page


def _checkpoint(job: JobView) -> str:
    """The newest one, and up to which step the replicas were found equal."""
    step, verified_step = job.status.checkpoint_step, job.status.verified_step
    if step is None:
        return ""
    return f"step {step}" + (f"; replicas were equal up to step {verified_step}" if verified_step is not None else "")


def workers_table(workers: Iterable[WorkerView]) -> Table:
    table = new_table(">rank", "worker", "state", "phase", ">step", ">generation", ">pid", "node")
    for worker in workers:
        rank = "-" if worker.rank is None else str(worker.rank)
        table.add_row(
            rank,
            worker.worker_id,
            worker.state,
            worker.phase,
            str(worker.step),
            str(worker.generation),
            str(worker.pid),
            f"{worker.node_ip} {worker.node_id[:8]}",
        )
    return table


def checkpoints_table(checkpoints: Sequence[CheckpointView]) -> Table | Text:
    if not checkpoints:
        return Text("no checkpoints yet", style="dim")
    table = new_table(">step", "state", ">size", ">took", ">stall", ">workers", "committed", "url")
    for one in checkpoints:
        style = _CHECKPOINT_STYLE[one.state]
        table.add_row(
            str(one.step),
            Text(one.state, style=style),
            size_text(one.bytes),
            duration_text(one.seconds),
            duration_text(one.stall_s),
            str(one.world_size),
            clock(one.committed_at) if one.committed_at else "-",
            f"{one.url}\n{one.message}" if one.message else one.url,
        )
    return table


def cluster_page(cluster: ClusterView) -> list[Any]:
    head = Text("connected" if cluster.connected else "not connected", style="green" if cluster.connected else "red")
    head.append(f"  {cluster.address}", style="dim")
    free = f"CPUs {cluster.cpus_free:g} of {cluster.cpus_total:g} free"
    if cluster.gpus_total:
        free += f", GPUs {cluster.gpus_free:g} of {cluster.gpus_total:g} free"
    owner = Text(f"control plane {cluster.owner}, epoch {cluster.epoch}", style="dim")
    return [head, Text(free), owner, nodes_table(cluster.nodes)]


def nodes_table(nodes: Sequence[NodeView]) -> Table:
    table = new_table("node", "ip", "state", ">cpus", ">gpus", ">memory", "why")
    for node in nodes:
        state, why = _node_state(node)
        table.add_row(
            node.node_id[:12], node.ip, state, f"{node.cpus:g}", f"{node.gpus:g}", f"{node.memory_gib:.1f} GiB", why
        )
    return table


def _node_state(node: NodeView) -> tuple[Text, str]:
    """The state of a node in one word, and its reason."""
    if not node.alive:
        return Text("dead", style="red"), ""
    if node.drain is not None:
        leaves = f", is switched off at {clock(node.drain.deadline)}" if node.drain.deadline is not None else ""
        left = f" ({count_text(node.num_workers, 'worker')} left)" if node.num_workers else ""
        return Text("draining" if left else "drained", style="yellow"), node.drain.reason + leaves + left
    if node.suspected:
        test = f", next test at {clock(node.next_test_at)}" if node.next_test_at is not None else ""
        return Text("probation" if node.on_probation else "suspected", style="yellow"), node.suspected + test
    return Text("alive", style="green"), ""


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def clock(at: float) -> str:
    """Local time, with the date if it is not today."""
    moment = datetime.datetime.fromtimestamp(at)
    today = datetime.datetime.now().date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M:%S")


def _validation(job: JobView) -> str:
    if job.status.val_loss is None:
        return ""
    bits = job.status.val_bits_per_byte
    return f"loss {number(job.status.val_loss)}" + (f", {bits:.3f} bits per byte" if bits is not None else "")


def _snapshots(job: JobView) -> str:
    every, share = job.status.snapshot_every_steps, job.status.snapshot_share
    if every is None:
        return ""
    pace = "after every step" if every == 1 else f"after every {every:g} steps"
    cost = f", {share:.2%} of the step time" if share is not None else ""
    return f"in memory of each worker, {pace}{cost}"


def _node_loss(job: JobView) -> str:
    bound = job.status.node_loss
    return "" if bound is None or job.status.state.ended else bound.words().removeprefix("a lost node ")


def _goodput(job: JobView) -> str:
    goodput = job.status.goodput
    return "" if goodput is None or goodput.ratio is None else f"{goodput.ratio:.1%}"


def new_table(*columns: str) -> Table:
    """Columns whose name starts with ">" are aligned to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table
