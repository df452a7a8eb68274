"""Shows a followed job: a live display in a terminal, one line per event elsewhere.

Called by cli/follow.py. Never requests anything from the server. `LiveScreen` keeps the progress at the bottom of the
terminal and scrolls events above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.live import Live
from rich.text import Text

from shoal_api.cli.output import STYLES, Output
from shoal_api.cli.render.live.panel import doing, job_panel
from shoal_api.cli.render.narrate import narrate, style
from shoal_api.cli.render.tables import clock, number, unit_of
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.workers import IncidentClosed, IncidentOpened
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.views import EventView, JobView

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_S = 10.0


class Screen(Protocol):
    """The display of a followed job; a context manager for the time in which the job is followed."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: EventView) -> None:
        """Show an event of the job."""
        ...

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
        """Show the newest status; called about twice a second. `now` is a monotonic time in seconds."""
        ...

    def notice(self, text: str, style: str = "plain") -> None:
        """Show a message of the command itself."""
        ...


class LiveScreen:
    """The display in a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._last_incident: EventView | None = None

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()

    def event(self, event: EventView) -> None:
        if event.type in (IncidentOpened.type, IncidentClosed.type):
            self._last_incident = event
        self.notice(event_text(event), style(event))

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
        self._live.update(job_panel(job, series, self._last_incident))

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

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
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

    def progress(self, job: JobView, series: Sequence[SeriesPoint], now: float) -> None:
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
        parts.append(f"{number(status.tokens_per_s, 0)} {unit_of(job)}/s")
    parts.append(f"{status.workers}/{count_text(status.desired_workers, 'worker')}")
    if status.eta_s is not None:
        parts.append(f"ETA {duration_text(status.eta_s)}")
    waiting = "; ".join(doing(job))
    return ", ".join(parts) + (f" ({waiting})" if waiting else "")
