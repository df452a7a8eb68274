"""Shows a followed job: a live panel in a terminal, one line per event elsewhere.

Never requests anything from the server. `LiveScreen` keeps the panel at the bottom of the terminal and scrolls events
above it. The server sends the words and the severity of an event with it (shoal_service/core/events), so an older
command line shows what a newer server reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.jobs import goodput_text, is_silent, step_text, steps_lost_text, token_unit
from shoal_api.cli.render.terminal import (
    NOT_REPORTED,
    STATE_STYLE,
    draw_sparkline,
    draw_worker_bar,
    format_number,
    format_time,
)
from shoal_api.cli.session import STYLES, Output
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events import IncidentClosed, IncidentOpened, Severity
from shoal_service.core.events.catalogue import one_line
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.views import EventView, JobView

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_S = 10.0
_STYLES = {Severity.INFO: "plain", Severity.SUCCESS: "good", Severity.WARNING: "warn", Severity.ERROR: "bad"}
_SPARKLINE_WIDTH = 30
_WIDTH = 100
_MAX_METRICS = 4
"""Metrics of the task's own that are shown, at most; `show` has all of them."""


class Screen:
    """The display of a followed job; a context manager for the time in which the job is followed. By itself it shows
    nothing but notices."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None

    def event(self, event: EventView) -> None:
        """Show an event of the job."""
        self.notice(event_text(event), find_style(event))

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
        """Show the newest status; called about twice a second. `now` is a monotonic time in seconds."""

    def notice(self, text: str, style: str = "plain") -> None:
        """Show a message of the command itself."""
        raise NotImplementedError


class LiveScreen(Screen):
    """The display in a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._last_incident: EventView | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()

    def event(self, event: EventView) -> None:
        if event.type in (IncidentOpened.type, IncidentClosed.type):
            self._last_incident = event
        super().event(event)

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
        self._live.update(job_panel(job, series, self._last_incident))

    def notice(self, text: str, style: str = "plain") -> None:
        self._live.console.print(Text(text, style=STYLES[style]))


class PlainScreen(Screen):
    """Text for pipes and log files: one line per event, and one about the progress every ten seconds."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._next_line_mono: float | None = None

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
        if self._next_line_mono is None:
            self._next_line_mono = now + _LINE_EVERY_S
        if now >= self._next_line_mono and not job.status.state.ended:
            self._next_line_mono = now + _LINE_EVERY_S
            self._write(progress_line(job), "dim")

    def notice(self, text: str, style: str = "plain") -> None:
        self._write(text, style)


class JsonScreen(Screen):
    """JSON for programs: one document per event on standard output; notices go to standard error."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def event(self, event: EventView) -> None:
        self._output.line(event, "")

    def notice(self, text: str, style: str = "plain") -> None:
        self._output.say(text, style)


def screen_for(output: Output) -> Screen:
    if output.as_json:
        return JsonScreen(output)
    if output.live:
        return LiveScreen(output.stdout)
    return PlainScreen(output.note)


def event_text(event: EventView) -> str:
    return f"{format_time(event.at)}  {narrate(event)}"


def progress_line(job: JobView) -> str:
    """`RUNNING step 120/400, loss 2.1034, 12,345 tokens/s, 4/4 workers, ETA 42 s`."""
    status = job.status
    step = step_text(job, "/")
    parts = [f"{status.state} step {step}" if step else str(status.state)]
    if status.loss is not None:
        parts.append(f"loss {format_number(status.loss)}")
    if status.tokens_per_s is not None:
        parts.append(f"{format_number(status.tokens_per_s, 0)} {token_unit(job)}/s")
    parts.append(f"{status.workers}/{count_text(status.desired_workers, 'worker')}")
    if status.eta_s is not None:
        parts.append(f"ETA {duration_text(status.eta_s)}")
    waiting = "; ".join(describe_activity(job))
    return ", ".join(parts) + (f" ({waiting})" if waiting else "")


def job_panel(job: JobView, series: Sequence[SeriesPoint], last_incident: EventView | None = None) -> RenderableType:
    """Return the panel. `last_incident` is the newest event of an incident."""
    status = job.status
    title = Text.assemble((job.name, "bold"), f"  {job.id}  ", (status.state, STATE_STYLE[status.state]))
    if status.reason:
        title.append(f" {status.reason}", style="dim")
    rows: list[RenderableType] = [_progress_bar(job), _curves(job, series)]
    if status.incidents or last_incident is not None:
        rows.append(_incidents(job, last_incident))
    rows.extend(Text(line, style="yellow") for line in describe_activity(job))
    return Panel(Group(*rows), title=title, title_align="left", width=_WIDTH, border_style="dim")


def describe_activity(job: JobView) -> tuple[str, ...]:
    """Say what the job does or waits for beside its steps: the progress of a preparation, of a validation, of a
    wait."""
    status = job.status
    return tuple(dict.fromkeys(line for line in (status.note, status.message) if line))


def _progress_bar(job: JobView) -> RenderableType:
    status, total, step = job.status, job.status.total_steps, step_text(job, "/")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=total or 1, completed=min(status.step, total or 0), width=40, pulse=total is None),
        Text(f"step {step}" if step else ""),
        Text(f"ETA {duration_text(status.eta_s)}" if status.eta_s is not None else "", style="dim"),
        Text(f"checkpoint {status.checkpoint_step}" if status.checkpoint_step is not None else "", style="dim"),
    )
    return bar


def _curves(job: JobView, series: Sequence[SeriesPoint]) -> RenderableType:
    status = job.status
    table = Table.grid(padding=(0, 2))
    validated = [point.val_loss for point in series if point.val_loss is not None]
    speed = [point.tokens_per_s for point in series]
    rows: list[tuple[str, str, Sequence[float], str]] = [
        ("loss", _reported(job, status.loss, 4), [point.loss for point in series], "cyan"),
        ("tokens/s", _reported(job, status.tokens_per_s, 0), speed, "blue"),
    ]
    if status.val_loss is not None:
        rows.insert(1, ("validation", format_number(status.val_loss), validated, "cyan"))
    for name in list(status.metrics)[:_MAX_METRICS]:
        seen = [point.metrics[name] for point in series if name in point.metrics]
        rows.insert(-1, (name, f"{status.metrics[name]:.4g}", seen, "cyan"))
    for label, value, values, style in rows:
        table.add_row(
            Text(label, style="dim"), Text(value), Text(draw_sparkline(values, _SPARKLINE_WIDTH), style=style)
        )
    is_whole = status.workers >= status.desired_workers
    bar = Text(draw_worker_bar(status.workers, status.desired_workers), style="green" if is_whole else "yellow")
    sizes = [float(point.world_size) for point in series]
    table.add_row(Text("workers", style="dim"), bar, Text(draw_sparkline(sizes, _SPARKLINE_WIDTH), style="green"))
    goodput = goodput_text(job)
    facts = [status.layout, f"goodput {goodput}" if goodput else ""]
    if any(facts):
        table.add_row(Text("layout" if status.layout else "", style="dim"), *(Text(fact) for fact in facts))
    return table


def _reported(job: JobView, value: float | None, digits: int) -> str:
    return NOT_REPORTED if value is None and is_silent(job) else format_number(value, digits)


def _incidents(job: JobView, last: EventView | None) -> RenderableType:
    text = Text(f"{count_text(job.status.incidents, 'incident')}, {steps_lost_text(job)}", style="dim")
    if last is not None:
        text.append(f"; last: {format_time(last.at)} {narrate(last)}")
    return text


def narrate(event: EventView) -> str:
    """Return what happened, in one line without control characters."""
    return one_line(event.message)


def find_style(event: EventView) -> str:
    """Return the name of the event's colour in `output.STYLES`."""
    return _STYLES[event.severity]
