"""Follows a job to its end: shows each event when it arrives, and the progress twice a second. Never changes the job.

    pump thread   reads the event stream with its own client and puts the events into a queue; reconnects
    caller        takes them from the queue; requests the job's status every half second

A restart of the control plane loses nothing: event numbers have no
gaps, so the pump continues after the last event that it has read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal_api.cli.render.progress import Screen
from shoal_api.client import Disconnected, ServerError
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import EventView, JobView
from shoal_workers.contract import EndReason

if TYPE_CHECKING:
    from shoal_api.client import Client

_TICK_S = 0.5
_RETRY_S = 1.0
_SERIES_EVERY_S = 2.0
_MAX_POINTS = 240
_PATIENCE_S = 60.0
"""How long the follower retries while the server is unreachable."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The server does not answer at the moment."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _End:
    """The history is complete, or an error prevents further reading."""

    error: Exception | None = None


_Item = EventView | _Lost | _End


def follow_job(
    open_client: Callable[[], Client],
    job_id: str,
    screen: Screen,
    *,
    after: int = 0,
    on_tick: Callable[[JobView], None] | None = None,
) -> JobView:
    """Show a job until it has ended; return its final state. `on_tick` is called with each status that is fetched.

    Raises Disconnected if the server is unreachable for longer than a minute, and ApiError as the client does.
    """
    items: queue.Queue[_Item] = queue.Queue()
    stop = threading.Event()
    pump = threading.Thread(
        target=_pump, args=(open_client, job_id, after, items, stop), name="shoal-events", daemon=True
    )
    with open_client() as client, screen:
        pump.start()
        try:
            _show(client, job_id, screen, items, on_tick)
            return client.job(job_id)
        finally:
            stop.set()


def _show(
    client: Client,
    job_id: str,
    screen: Screen,
    items: queue.Queue[_Item],
    on_tick: Callable[[JobView], None] | None,
) -> None:
    series: Sequence[SeriesPoint] = ()
    job: JobView | None = None
    next_series = next_status = time.monotonic()
    is_away = False
    while True:
        now = time.monotonic()
        if now >= next_status:
            next_status = now + _TICK_S
            try:
                job = client.job(job_id)
                if now >= next_series:
                    next_series = now + _SERIES_EVERY_S
                    series = client.series(job_id, max_points=_MAX_POINTS)
            except (Disconnected, ServerError):
                pass  # the pump has the same error; it decides how long to wait
            else:
                screen.progress(job, series, now)
                if on_tick is not None:
                    on_tick(job)
        try:
            item = items.get(timeout=max(0.01, next_status - time.monotonic()))
        except queue.Empty:
            continue
        match item:
            case EventView():
                if is_away:
                    screen.notice("the server answers again", "good")
                is_away = False
                screen.event(item)
            case _Lost(error):
                if not is_away:
                    screen.notice(f"the server does not answer ({error}); {meanwhile(job)}. Trying again ...", "warn")
                is_away = True
            case _End(error):
                if error is not None:
                    raise error
                return


def meanwhile(job: JobView | None) -> str:
    """Say what a job does while the server is away, from its last known status."""
    if job is None or (job.status.state.holds_workers and job.status.reason != EndReason.SERVER_STOPPED):
        return "the job continues as long as its Ray cluster runs"
    if job.status.reason == EndReason.SERVER_STOPPED:
        return "it has stopped in order, and the next server continues the job from its last step"
    return f"the job is {job.status.state}"


def _pump(
    open_client: Callable[[], Client], job_id: str, after: int, items: queue.Queue[_Item], stop: threading.Event
) -> None:
    last = after
    lost_since: float | None = None
    try:
        with open_client() as client:
            while not stop.is_set():
                try:
                    for event in client.events(job_id, after=last, follow=True):
                        lost_since = None
                        last = event.seq  # after a lost connection no event is shown twice
                        items.put(event)
                        if stop.is_set():
                            return
                    items.put(_End())
                    return
                except Disconnected as error:  # after several retries of the client
                    now = time.monotonic()
                    lost_since = now if lost_since is None else lost_since
                    if now - lost_since > _PATIENCE_S:
                        raise
                    items.put(_Lost(error))
                    stop.wait(_RETRY_S)
    except Exception as error:  # the catch-all of this thread; the caller raises the error
        items.put(_End(error))
