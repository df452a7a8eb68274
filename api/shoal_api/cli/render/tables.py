"""Resources of the API as tables and pages for a terminal. Pure: takes views, returns objects that rich prints."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal_service.core.quantities import count_text, duration_text, size_text
from shoal_service.fleet_views import FleetJob, NodeView, WindowView
from shoal_service.views import (
    CheckpointState,
    CheckpointView,
    JobSummary,
    JobView,
    VerificationState,
    VerificationView,
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
_GAP = 2
_LEAST_SENTENCE = 40
"""Columns that a sentence at the end of a row needs to be readable."""
_MOST = 40
"""Columns of a value that is not the last one; a longer one is folded."""
_CHECKPOINT_STYLE = {
    CheckpointState.COMMITTED: "green",
    CheckpointState.DAMAGED: "red",
    CheckpointState.DELETED: "dim",
    CheckpointState.FAILED: "red",
}


def jobs_table(jobs: Sequence[JobSummary], now: float) -> Table | Text:
    if not jobs:
        return Text("no jobs; `shoal submit SPEC` creates one", style="dim")
    several = in_several_clusters(jobs)
    where = ("cluster",) if several else ()
    columns = ("project", "user", ">priority", "state", ">step", ">loss", ">workers", ">age")
    table = new_table("id", "name", *where, *columns)
    for job in jobs:
        state = Text(job.state, style=STATE_STYLE[job.state])
        if job.queue_position is not None:
            state.append(f" #{job.queue_position}", style="dim")
        elif job.reason:
            state.append(f" {job.reason}", style="dim")
        step = f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step)
        workers = f"{job.workers}/{job.desired_workers}" if job.desired_workers else "-"
        age = duration_text(now - job.created_at)
        where = (job.cluster or "-",) if several else ()
        whose = (*where, job.project, job.user, str(job.priority))
        table.add_row(job.id, job.name, *whose, state, step, number(job.loss), workers, age)
    return table


def in_several_clusters(jobs: Iterable[JobSummary]) -> bool:
    return len({job.cluster for job in jobs if job.cluster}) > 1


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
            Text(f"{one.state}{', pinned' if one.pinned else ''}{_best(one)}", style=style),
            *(
                (size_text(one.bytes), duration_text(one.seconds), duration_text(one.stall_s), str(one.world_size))
                if one.world_size
                else ("-",) * 4  # nothing is known of it but that it is deleted or damaged
            ),
            clock(one.committed_at) if one.committed_at else "-",
            f"{one.url}\n{one.message}" if one.message else one.url,
        )
    return table


def _best(one: CheckpointView) -> str:
    return "" if one.best is None else f", best ({one.score:.4g})" if one.best == 1 else f", {one.best}. best"


def verification_line(found: VerificationView) -> str:
    """`step-...: 1.5 GiB of 3.0 GiB read in 4.0 s`, or the result."""
    if found.state is VerificationState.RUNNING:
        return f"{found.name}: {size_text(found.bytes_read)} of {size_text(found.bytes)} read"
    if found.state is VerificationState.WHOLE:
        return f"{found.name}: whole, {size_text(found.bytes_read)} read in {duration_text(found.seconds)}"
    return f"{found.name} is {found.state}: {found.message}"


def nodes_table(nodes: Sequence[NodeView]) -> Table:
    """Nodes by cluster, if there are several."""
    several = len({node.cluster for node in nodes}) > 1
    table = new_table("node", *(("cluster",) if several else ()), "ip", "state", ">cpus", ">gpus", ">memory", "why")
    for node in sorted(nodes, key=lambda one: one.cluster) if several else nodes:
        state, why = _node_state(node)
        where = (node.cluster,) if several else ()
        table.add_row(
            node.node_id[:12],
            *where,
            node.ip,
            state,
            f"{node.cpus:g}",
            f"{node.gpus:g}",
            f"{node.memory_gib:.1f} GiB",
            why,
        )
    return table


def windows_table(windows: Sequence[WindowView]) -> Table | Text:
    if not windows:
        return Text("no maintenance windows; `shoal maintenance add` plans one", style="dim")
    table = new_table("window", "drains at", "from", "to", "nodes", "reason")
    for one in windows:
        nodes = ", ".join(node[:15] for node in one.nodes)
        table.add_row(one.window_id, clock(one.drains_at), clock(one.begins_at), clock(one.ends_at), nodes, one.reason)
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
    planned = f"drains for maintenance at {clock(node.maintenance_at)}" if node.maintenance_at is not None else ""
    if node.cordon is not None:
        return Text("cordoned", style="yellow"), "; ".join(filter(None, (node.cordon.reason, planned)))
    return Text("alive", style="green"), "; ".join(filter(None, (_use_of_others(node), planned)))


def _use_of_others(node: NodeView) -> str:
    used = ((node.cpus_of_others, "CPU"), (node.gpus_of_others, "GPU"))
    words = " and ".join(f"{amount:g} {unit}" for amount, unit in used if amount)
    return f"others have reserved {words}" if words else ""


def unit_of(job: JobView) -> str:
    """Tokens or samples: a task without tokens counts one for each sample."""
    status = job.status
    is_plain = status.step and status.tokens == status.step * job.spec.batch.global_size
    return "samples" if is_plain else "tokens"


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def clock(at: float) -> str:
    """Local time, with the date if it is not today."""
    moment = datetime.datetime.fromtimestamp(at)
    today = datetime.datetime.now().date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M:%S")


class Listing(Table):
    """A table that is readable at any width. What does not fit beside the first columns stands under its row, as names
    and values; so no id is broken and no sentence is squeezed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max([cell_len(str(one.header)), *(_width(cell) for cell in one.cells)]) for one in self.columns]
        *first, last = [min(width, _MOST) for width in widths[:-1]] + widths[-1:]
        if sum(first) + _GAP * len(first) + min(last, _LEAST_SENTENCE) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        kept = first[:1]
        while len(kept) < len(first) and sum(kept) + first[len(kept)] + _GAP * len(kept) <= options.max_width:
            kept.append(first[len(kept)])
        yield self._line(kept, [Text(str(one.header), style="bold") for one in self.columns])
        for index, row in enumerate(self.rows):
            cells = [_text(next(iter(list(one.cells)[index : index + 1]), "")) for one in self.columns]
            yield self._line(kept, cells)
            rest = zip(self.columns[len(kept) :], cells[len(kept) :], strict=True)
            others = [_named(str(one.header), cell) for one, cell in rest if cell.plain not in ("", "-")]
            if others:
                yield Padding(Text(", ", style=row.style or "").join(others), (0, 0, 0, 2 * _GAP))

    def _line(self, widths: Sequence[int], cells: Sequence[Text]) -> Table:
        line = Table.grid(padding=(0, _GAP, 0, 0))
        for column, width in zip(self.columns, widths, strict=False):
            line.add_column(justify=column.justify, width=width, overflow="fold")
        line.add_row(*cells[: len(widths)])
        return line


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _width(cell: Any) -> int:
    return max((cell_len(line) for line in _text(cell).plain.splitlines()), default=0)


def _named(name: str, cell: Text) -> Text:
    value = Text(" ").join(cell.split("\n"))
    return Text.assemble((f"{name} " if name else "", "dim"), value)


def new_table(*columns: str) -> Listing:
    """Columns whose name starts with ">" are aligned to the right."""
    table = Listing(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def sweep_table(jobs: Sequence[FleetJob]) -> Table:
    """The jobs of a sweep with the values that differ between them."""
    names = sorted({name for job in jobs for name in job.labels if name != "sweep"})
    differ = [name for name in names if len({job.labels.get(name) for job in jobs}) > 1] or names
    table = new_table("id", *differ, "state", ">step", ">loss", ">validation", ">workers", "why")
    for job in jobs:
        state = Text(job.state, style=STATE_STYLE[job.state])
        step = f"{job.step}" + (f"/{job.total_steps}" if job.total_steps else "")
        table.add_row(
            job.id,
            *(job.labels.get(name, "-") for name in differ),
            state,
            step,
            number(job.loss),
            number(job.val_loss),
            str(job.workers),
            "" if job.state is JobState.RUNNING else job.message,
        )
    return table
