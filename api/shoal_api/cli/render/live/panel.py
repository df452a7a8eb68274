"""The live panel of one job: progress, curves, world size, goodput, last incident, and what it waits for. Pure.

Shown by `watch`, `submit --follow` and the demo (`progress.LiveScreen`). The words are those of `show`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.narrate import narrate
from shoal_api.cli.render.sparkline import sparkline, worker_bar
from shoal_api.cli.render.tables import STATE_STYLE, clock, number
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.views import EventView, JobView

_SPARKLINE_WIDTH = 30
_WIDTH = 100
_MAX_METRICS = 4
"""Metrics of the task's own that are shown, at most; `show` has all of them."""


def job_panel(job: JobView, series: Sequence[SeriesPoint], last_incident: EventView | None = None) -> RenderableType:
    """`last_incident`: the newest event of an incident."""
    status = job.status
    title = Text.assemble((job.name, "bold"), f"  {job.id}  ", (status.state, STATE_STYLE[status.state]))
    if status.reason:
        title.append(f" {status.reason}", style="dim")
    rows: list[RenderableType] = [_progress(job), _curves(job, series)]
    if status.incidents or last_incident is not None:
        rows.append(_incidents(job, last_incident))
    rows.extend(Text(line, style="yellow") for line in doing(job))
    return Panel(Group(*rows), title=title, title_align="left", width=_WIDTH, border_style="dim")


def doing(job: JobView) -> tuple[str, ...]:
    """What the job does or waits for beside its steps: progress of a preparation, of a validation, of a wait."""
    status = job.status
    return tuple(dict.fromkeys(line for line in (status.note, status.message) if line))


def _progress(job: JobView) -> RenderableType:
    status, total = job.status, job.status.total_steps
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=total or 1, completed=min(status.step, total or 0), width=40, pulse=total is None),
        Text(f"step {status.step}" + (f"/{total}" if total else "")),
        Text(f"ETA {duration_text(status.eta_s)}" if status.eta_s is not None else "", style="dim"),
        Text(f"checkpoint {status.checkpoint_step}" if status.checkpoint_step is not None else "", style="dim"),
    )
    return bar


def _curves(job: JobView, series: Sequence[SeriesPoint]) -> RenderableType:
    status = job.status
    table = Table.grid(padding=(0, 2))
    validated = [point.val_loss for point in series if point.val_loss is not None]
    rows: list[tuple[str, str, Sequence[float], str]] = [
        ("loss", number(status.loss), [point.loss for point in series], "cyan"),
        ("tokens/s", number(status.tokens_per_s, 0), [point.tokens_per_s for point in series], "blue"),
    ]
    if status.val_loss is not None:
        rows.insert(1, ("validation", number(status.val_loss), validated, "cyan"))
    for name in list(status.metrics)[:_MAX_METRICS]:
        seen = [point.metrics[name] for point in series if name in point.metrics]
        rows.insert(-1, (name, f"{status.metrics[name]:.4g}", seen, "cyan"))
    for label, value, values, style in rows:
        table.add_row(Text(label, style="dim"), Text(value), Text(sparkline(values, _SPARKLINE_WIDTH), style=style))
    is_whole = status.workers >= status.desired_workers
    bar = Text(worker_bar(status.workers, status.desired_workers), style="green" if is_whole else "yellow")
    sizes = [float(point.world_size) for point in series]
    table.add_row(Text("workers", style="dim"), bar, Text(sparkline(sizes, _SPARKLINE_WIDTH), style="green"))
    facts = [status.layout, _goodput(job)]
    if any(facts):
        table.add_row(Text("layout" if status.layout else "", style="dim"), *(Text(fact) for fact in facts))
    return table


def _goodput(job: JobView) -> str:
    goodput = job.status.goodput
    return "" if goodput is None or goodput.ratio is None else f"goodput {goodput.ratio:.1%}"


def _incidents(job: JobView, last: EventView | None) -> RenderableType:
    head = f"{count_text(job.status.incidents, 'incident')}, {count_text(job.status.steps_lost, 'step')} lost"
    text = Text(head, style="dim")
    if last is not None:
        text.append(f"; last: {clock(last.at)} {narrate(last)}")
    return text
