"""What people read about a job that waits: its position, who holds what it waits for, and when it is expected to start.

Called by `decide`. Expected starts follow the present rates of running jobs; a job of unknown length promises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from shoal_service.core.scheduling.admission import Obstacle
from shoal_service.core.scheduling.market import Wait
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.reservations import timeline
from shoal_service.core.scheduling.room import UNLIMITED, Shape
from shoal_service.core.scheduling.shares import Share

MAX_HOLDERS = 5
"""A list of more jobs helps nobody."""


class Forecast:
    """Expected starts on one shape's nodes: each waiting job takes what comes free after those before it."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self._ends = timeline(plan, shape, earliest=False)
        self._at = 0
        self.room = self.free = shape.free()
        self._now = plan.now

    def place(self, workers: int) -> tuple[float | None, tuple[str, ...]]:
        """When so many workers have come free beyond those of earlier calls, and from which jobs."""
        first = self._at
        while self.free < workers and self._at < len(self._ends):
            self.free += self._ends[self._at][1]
            self._at += 1
        holders = tuple(name for _, _, name in self._ends[max(0, min(first, self._at - 1)) : self._at][:MAX_HOLDERS])
        if self.free < workers:
            self.free = -UNLIMITED
            return None, holders
        self.free -= workers
        return (self._ends[self._at - 1][0] if self._at else self._now), holders


def waits(plan: Plan, waiting: Sequence[tuple[Entry, Obstacle]]) -> list[Wait]:
    """A decision for each waiting job, in order. Called before the rest is divided, which counts as free here."""
    forecasts: dict[int, Forecast] = {}
    holders_of: dict[int, tuple[str, ...]] = {}
    decisions: list[Wait] = []
    for position, (entry, obstacle) in enumerate(waiting, 1):
        job, share = entry.job, obstacle.share
        if obstacle.words is not None:
            if share is not None and id(share) not in holders_of:
                holders_of[id(share)] = _jobs_of(plan, share)
            holders = () if share is None else holders_of[id(share)]
            decisions.append(Wait(job.job_id, obstacle.words, position, holders))
            continue
        forecast = forecasts.get(id(entry.shape))
        if forecast is None:
            forecast = forecasts[id(entry.shape)] = Forecast(plan, entry.shape)
        at, holders = forecast.place(job.min_workers)
        decisions.append(Wait(job.job_id, _room_words(entry, forecast.room, obstacle), position, holders, at))
    return decisions


def _jobs_of(plan: Plan, share: Share) -> tuple[str, ...]:
    """Running jobs of a project and of those below it."""
    inside = (entry.job.job_id for entry in (*plan.running, *plan.queued) if entry.target and share in entry.share.path)
    return tuple(islice(inside, MAX_HOLDERS))


def _room_words(entry: Entry, room: int, obstacle: Obstacle) -> str:
    job = entry.job
    needs = f"Needs {job.min_workers} workers of {entry.shape.words} each"
    if obstacle.behind is not None:
        return f"{needs}; to start now would delay {obstacle.behind}, which is before it and whose start is reserved."
    return (
        f"{needs}; {room} can be had by shrinking others, the rest is at the minima of running jobs. "
        f"A priority above {job.priority} may preempt, more nodes help always."
    )
