"""Follows a job to its end: shows each event when it arrives, and the progress twice a second. Never changes the job.

A long poll for the next event returns at once when there is one, and otherwise when the next status is due. A restart
of the control plane loses nothing: event numbers have no gaps, so the follower continues after the last event that it
has shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal_api.cli.render.progress import Screen
from shoal_api.client import Disconnected, ServerError
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import JobView
from shoal_workers.contract import EndReason

if TYPE_CHECKING:
    from shoal_api.client import Client

_TICK_S = 0.5
_RETRY_S = 1.0
_SERIES_EVERY_S = 2.0
_MAX_POINTS = 240
_MAX_EVENTS = 1000
_PATIENCE_S = 60.0
"""How long the follower retries while the server is unreachable."""


def follow_job(
    client: Client, job_id: str, screen: Screen, on_tick: Callable[[JobView], None] | None = None
) -> JobView:
    """Show a job until it has ended; return its final state. `on_tick` is called with each status that is fetched.

    Raises Disconnected if the server is unreachable for longer than a minute, and ApiError as the client does.
    """
    series: Sequence[SeriesPoint] = ()
    job: JobView | None = None
    last_event = 0
    series_due_mono = status_due_mono = time.monotonic()
    away_since_mono: float | None = None
    with screen:
        while True:
            now_mono = time.monotonic()
            try:
                if now_mono >= status_due_mono:
                    status_due_mono = now_mono + _TICK_S
                    job = client.job(job_id)
                    if now_mono >= series_due_mono:
                        series_due_mono = now_mono + _SERIES_EVERY_S
                        series = client.series(job_id, max_points=_MAX_POINTS)
                    screen.progress(job, series, now_mono)
                    if on_tick is not None:
                        on_tick(job)
                wait_s = max(0.01, status_due_mono - time.monotonic())
                page = client.events_page(job_id, after=last_event, wait_s=wait_s, limit=_MAX_EVENTS)
            except (Disconnected, ServerError) as error:  # after several retries of the client
                if away_since_mono is None:
                    away_since_mono = time.monotonic()
                    consequence = describe_meanwhile(job)
                    screen.notice(f"the server does not answer ({error}); {consequence}. Trying again ...", "warn")
                if time.monotonic() - away_since_mono > _PATIENCE_S:
                    raise
                time.sleep(_RETRY_S)  # not a wait for an event: the server is asked again
                continue
            if away_since_mono is not None:
                screen.notice("the server answers again", "good")
            away_since_mono = None
            for event in page.items:
                screen.event(event)
            last_event = page.next_after
            if page.ended:
                return client.job(job_id)


def describe_meanwhile(job: JobView | None) -> str:
    """Say what a job does while the server is unreachable, from its last known status."""
    if job is None or (job.status.state.holds_workers and job.status.reason != EndReason.SERVER_STOPPED):
        return "the job continues as long as its Ray cluster runs"
    if job.status.reason == EndReason.SERVER_STOPPED:
        return "it has stopped in order, and the next server continues the job from its last step"
    return f"the job is {job.status.state}"
