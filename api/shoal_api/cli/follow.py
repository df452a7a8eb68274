"""Follows a job to its end: events as they happen, progress twice a second. Never touches the job.

    pump thread   long-polls the events with its own client and puts them into a queue; reconnects by itself
    caller        takes them out, asks for the job's status whenever nothing has come for half a second

The job does not need the follower, and the follower survives a restart of the control plane: events are numbered
without gaps, so it goes on after the last one that it has shown.
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
from shoal_service.views import EventView, JobView

if TYPE_CHECKING:
    from shoal_api.client import Client

_TICK_S = 0.5
_RETRY_S = 1.0
_SERIES_EVERY_S = 2.0
_PATIENCE_S = 60.0
"""How long an unreachable server is asked again."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The server does not answer."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _End:
    """The history is complete, or cannot be read any further."""

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
    """Show a job until it has ended; return its last state. `on_tick` sees every status that is fetched.

    Raises Disconnected when the server stays away for longer than a minute, and ApiError as the client does.
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
    losses: Sequence[float] = ()
    next_series = next_status = time.monotonic()
    away = False
    while True:
        now = time.monotonic()
        if now >= next_status:
            next_status = now + _TICK_S
            try:
                job = client.job(job_id)
                if now >= next_series:
                    next_series = now + _SERIES_EVERY_S
                    losses = [point.loss for point in client.series(job_id)]
            except (Disconnected, ServerError):
                pass  # the pump sees it too; it decides how long to wait
            else:
                screen.progress(job, losses, now)
                if on_tick is not None:
                    on_tick(job)
        try:
            item = items.get(timeout=max(0.01, next_status - time.monotonic()))
        except queue.Empty:
            continue
        match item:
            case EventView():
                if away:
                    screen.notice("the server is back", "good")
                away = False
                screen.event(item)
            case _Lost(error):
                if not away:
                    screen.notice(
                        f"the server does not answer ({error}); the job needs it not. Trying again ...", "warn"
                    )
                away = True
            case _End(error):
                if error is not None:
                    raise error
                return


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
                        last = event.seq
                        items.put(event)
                        if stop.is_set():
                            return
                    items.put(_End())
                    return
                except Disconnected as error:  # the client has tried several times by now
                    now = time.monotonic()
                    lost_since = now if lost_since is None else lost_since
                    if now - lost_since > _PATIENCE_S:
                        raise
                    items.put(_Lost(error))
                    stop.wait(_RETRY_S)
    except Exception as error:  # the boundary of this thread: whatever it is, the caller raises it
        items.put(_End(error))
