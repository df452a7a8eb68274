"""What people read about a job that waits: its position, who holds what it waits for, and when it is expected to start.

Called by `decide`. Expected starts follow the present rates of running jobs; a job of unknown length promises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from shoal_service.core.scheduling.admission import Obstacle
from shoal_service.core.scheduling.market import Wait
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.reservations import Ends
from shoal_service.core.scheduling.room import UNLIMITED, Shape
from shoal_service.core.scheduling.shares import Share

MAX_HOLDERS = 5
"""A list of more jobs helps nobody."""


class Forecast:
    """Expected starts on one shape's nodes: each waiting job takes what comes free after those before it."""

    def __init__(self, plan: Plan, shape: Shape, ends: Ends) -> None:
        self._coming = ends.of(shape)
        self._last: tuple[str, ...] = ()
        """The job that ended last in this forecast."""
        self._at = plan.now
        self.room = self.free = shape.free()
        self._words: dict[tuple[int, int, str | None], str] = {}

    def place(self, workers: int) -> tuple[float | None, tuple[str, ...]]:
        """When so many workers have come free beyond those of earlier calls, and from which jobs."""
        if self.free < 0:
            return None, self._last
        holders: list[str] = []
        while self.free < workers:
            following = next(self._coming, None)
            if following is None:
                self.free = -UNLIMITED
                return None, self._held_by(holders)
            self._at, freed, job_id = following
            self.free += freed
            holders.append(job_id)
        self.free -= workers
        return self._at, self._held_by(holders)

    def _held_by(self, holders: list[str]) -> tuple[str, ...]:
        if not holders:
            return self._last
        self._last = (holders[-1],)
        return tuple(holders[:MAX_HOLDERS])

    def words(self, entry: Entry, behind: str | None) -> str:
        """Why the job does not start; the same for all jobs of its minimum and priority."""
        key = (entry.job.min_workers, entry.job.priority, behind)
        words = self._words.get(key)
        if words is None:
            words = self._words[key] = _room_words(entry, self.room, behind)
        return words


def waits(plan: Plan, waiting: Sequence[tuple[Entry, Obstacle]]) -> list[Wait]:
    """A decision for each waiting job, in order. Called before the rest is divided, which counts as free here."""
    forecasts: dict[int, Forecast] = {}
    ends: Ends | None = None
    holders_of: dict[int, tuple[str, ...]] = {}
    decisions: list[Wait] = []
    for position, (entry, obstacle) in enumerate(waiting, 1):
        job, share = entry.job, obstacle.share
        if obstacle.words is not None:
            if share is not None and id(share) not in holders_of:
                holders_of[id(share)] = _jobs_of(plan, share)
            holders = () if share is None else holders_of[id(share)]
            if obstacle.user:
                holders = _jobs_of_user(plan, obstacle.user)
            is_limit = share is not None or bool(obstacle.user)
            decisions.append(Wait(job.job_id, obstacle.words, position, holders, waits_for_limit=is_limit))
            continue
        forecast = forecasts.get(id(entry.shape))
        if forecast is None:
            ends = ends or Ends(plan, earliest=False)
            forecast = forecasts[id(entry.shape)] = Forecast(plan, entry.shape, ends)
        at, holders = forecast.place(job.min_workers)
        decisions.append(Wait(job.job_id, forecast.words(entry, obstacle.behind), position, holders, at))
    return decisions


def _jobs_of(plan: Plan, share: Share) -> tuple[str, ...]:
    """Running jobs of a project and of those below it."""
    inside = (entry.job.job_id for entry in (*plan.running, *plan.queued) if entry.target and share in entry.share.path)
    return tuple(islice(inside, MAX_HOLDERS))


def _jobs_of_user(plan: Plan, user: str) -> tuple[str, ...]:
    inside = (entry.job.job_id for entry in (*plan.running, *plan.queued) if entry.target and entry.job.user == user)
    return tuple(islice(inside, MAX_HOLDERS))


def _room_words(entry: Entry, room: int, behind: str | None) -> str:
    job = entry.job
    needs = f"Needs {job.min_workers} workers of {entry.shape.words} each"
    if behind is not None:
        return f"{needs}; to start now would delay {behind}, which is before it and whose start is reserved."
    return (
        f"{needs}; {room} can be had by shrinking others, the rest is at the minima of running jobs. "
        f"A priority above {job.priority} may preempt, more nodes help always."
    )
