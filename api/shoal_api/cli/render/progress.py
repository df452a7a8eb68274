"""Shows a followed job: a live display in a terminal, one line per event elsewhere.

Called by cli/follow.py. Never requests anything from the server. `LiveScreen` keeps the progress at the bottom of the
terminal and scrolls events above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal_api.cli.output import STYLES, Output
from shoal_api.cli.render.narrate import narrate, style
from shoal_api.cli.render.sparkline import sparkline, worker_bar
from shoal_api.cli.render.tables import STATE_STYLE, clock, number
from shoal_service.core.quantities import duration_text
from shoal_service.views import EventView, JobView

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_S = 10.0
_SPARKLINE_WIDTH = 30


class Screen(Protocol):
    """The display of a followed job; a context manager for the time in which the job is followed."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: EventView) -> None:
        """Show an event of the job."""
        ...

    def progress(self, job: JobView, losses: Sequence[float], now: float) -> None:
        """Show the newest status; called about twice a second. `now` is a monotonic time in seconds."""
        ...

    def notice(self, text: str, style: str = "plain") -> None:
        """Show a message of the command itself."""
        ...


class LiveScreen:
    """The display in a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()

    def event(self, event: EventView) -> None:
        self.notice(event_text(event), style(event))

    def progress(self, job: JobView, losses: Sequence[float], now: float) -> None:
        self._live.update(picture(job, losses))

    def notice(self, text: str, style: str = "plain") -> None:
        self._live.console.print(Text(text, style=STYLES[style]))


class PlainScreen:
    """Text for pipes and log files: one line per event, and one about the progress every ten seconds."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._next_line_mono: float | None = None

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None

    def event(self, event: EventView) -> None:
        self._write(event_text(event), style(event))

    def progress(self, job: JobView, losses: Sequence[float], now: float) -> None:
        if self._next_line_mono is None:
            self._next_line_mono = now + _LINE_EVERY_S
        if now >= self._next_line_mono and not job.status.state.ended:
            self._next_line_mono = now + _LINE_EVERY_S
            self._write(progress_line(job), "dim")

    def notice(self, text: str, style: str = "plain") -> None:
        self._write(text, style)


class JsonScreen:
    """JSON for programs: one document per event on standard output; notices go to standard error."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def __enter__(self) -> JsonScreen:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None

    def event(self, event: EventView) -> None:
        self._output.line(event, "")

    def progress(self, job: JobView, losses: Sequence[float], now: float) -> None:
        return None

    def notice(self, text: str, style: str = "plain") -> None:
        self._output.say(text, style)


def screen_for(output: Output) -> Screen:
    if output.as_json:
        return JsonScreen(output)
    if output.live:
        return LiveScreen(output.stdout)
    return PlainScreen(lambda text, style: output.line(None, text, style))


def event_text(event: EventView) -> str:
    return f"{clock(event.at)}  {narrate(event)}"


def progress_line(job: JobView) -> str:
    """`RUNNING step 120/400, loss 2.1034, 12,345 tokens/s, 4/4 workers, ETA 42 s`."""
    status = job.status
    parts = [f"{status.state} step {status.step}" + (f"/{status.total_steps}" if status.total_steps else "")]
    if status.loss is not None:
        parts.append(f"loss {number(status.loss)}")
    if status.tokens_per_s is not None:
        parts.append(f"{number(status.tokens_per_s, 0)} tokens/s")
    parts.append(f"{status.workers}/{status.desired_workers} workers")
    if status.eta_s is not None:
        parts.append(f"ETA {duration_text(status.eta_s)}")
    waiting = status.note or status.message
    return ", ".join(parts) + (f" ({waiting})" if waiting else "")


def picture(job: JobView, losses: Sequence[float]) -> RenderableType:
    """Three lines: name and state; progress; loss, throughput and workers."""
    status = job.status
    head = Text.assemble((job.name, "bold"), f"  {job.id}  ", (status.state, STATE_STYLE[status.state]))
    waiting = status.message or status.note or status.reason
    if waiting:
        head.append(f"  {waiting}", style="dim")
    bar = Table.grid(padding=(0, 1))
    total = status.total_steps
    bar.add_row(
        ProgressBar(total=total or 1, completed=min(status.step, total or 0), width=40, pulse=total is None),
        Text(f"step {status.step}" + (f"/{total}" if total else "")),
        Text(f"ETA {duration_text(status.eta_s)}" if status.eta_s is not None else "", style="dim"),
    )
    numbers = Text.assemble(
        ("loss ", "dim"),
        number(status.loss),
        "  ",
        (sparkline(losses, _SPARKLINE_WIDTH), "cyan"),
        ("   tokens/s ", "dim"),
        number(status.tokens_per_s, 0),
        ("   workers ", "dim"),
        (worker_bar(status.workers, status.desired_workers), _workers_style(job)),
    )
    return Group(head, bar, numbers)


def _workers_style(job: JobView) -> str:
    return "green" if job.status.workers >= job.status.desired_workers else "yellow"
