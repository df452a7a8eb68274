"""What people read about a job that waits: its position, who holds what it waits for, and when it is expected to start.

Called by `decide`. Expected starts follow the present rates of running jobs; a job of unknown length promises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.admission import Obstacle
from shoal_service.core.scheduling.market import Wait
from shoal_service.core.scheduling.plan import Claim, Entry, Plan
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

    def place(self, workers: int) -> tuple[float | None, tuple[str, ...]]:
        """When so many workers have come free beyond those of earlier calls, and from which jobs."""
        if self.free >= workers:
            self.free -= workers
            return self._at, self._last
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


def waits(plan: Plan, waiting: Sequence[tuple[Entry, Obstacle]]) -> list[Wait]:
    """A decision for each waiting job, in order. Called before the rest is divided, which counts as free here."""
    words = _Words(plan)
    decisions: list[Wait] = []
    explained: Obstacle | None = None  # thousands in a row may have the same
    for position, (entry, obstacle) in enumerate(waiting, 1):
        job = entry.job
        if obstacle.words is not None:
            if obstacle is not explained:
                explained, limited_by = obstacle, words.holders(obstacle)
            decisions.append(Wait(job.job_id, obstacle.words, position, limited_by, None, obstacle.is_limit))
            continue
        forecast, reason = words.room(entry, obstacle.behind)
        at, holders = forecast.place(job.min_workers)
        decisions.append(Wait(job.job_id, reason, position, holders, at))
    return decisions


class _Words:
    """What is equal for jobs that ask for the same; looked up once in a decision."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ends: Ends | None = None
        self._forecasts: dict[int, Forecast] = {}
        """By identity of the shape."""
        self._rooms: dict[tuple[Claim, str | None], tuple[Forecast, str]] = {}
        self._holders: dict[tuple[Share | None, str, tuple[str, str] | None], tuple[str, ...]] = {}

    def room(self, entry: Entry, behind: str | None) -> tuple[Forecast, str]:
        """The forecast of the job's start, and why it does not start now."""
        known = self._rooms.get((entry.claim, behind))
        if known is None:
            forecast = self._forecast(entry.shape)
            known = self._rooms[entry.claim, behind] = forecast, _room_words(entry, forecast.room, behind)
        return known

    def holders(self, obstacle: Obstacle) -> tuple[str, ...]:
        """The running jobs that count for the limit that is in the way."""
        key = obstacle.share, obstacle.user, obstacle.sweep
        known = self._holders.get(key)
        if known is None:
            known = self._holders[key] = _holders_of(self._plan, *key)
        return known

    def _forecast(self, shape: Shape) -> Forecast:
        forecast = self._forecasts.get(id(shape))
        if forecast is None:
            self._ends = self._ends or Ends(self._plan)
            forecast = self._forecasts[id(shape)] = Forecast(self._plan, shape, self._ends)
        return forecast


def _holders_of(plan: Plan, share: Share | None, user: str, sweep: tuple[str, str] | None) -> tuple[str, ...]:
    if share is not None:
        return _jobs_of(plan, share)
    if sweep is not None:
        return _jobs_of_sweep(plan, *sweep)
    return _jobs_of_user(plan, user) if user else ()


def _jobs_of(plan: Plan, share: Share) -> tuple[str, ...]:
    """Running jobs of a project and of those below it."""
    inside = (entry.job.job_id for entry in (*plan.running, *plan.queued) if entry.target and share in entry.share.path)
    return tuple(islice(inside, MAX_HOLDERS))


def _jobs_of_sweep(plan: Plan, project: str, sweep: str) -> tuple[str, ...]:
    entries = (entry for entry in (*plan.leaving, *plan.running, *plan.queued) if entry.charged)
    inside = (one.job.job_id for one in entries if (one.job.project, one.job.sweep) == (project, sweep))
    return tuple(islice(inside, MAX_HOLDERS))


def _jobs_of_user(plan: Plan, user: str) -> tuple[str, ...]:
    inside = (entry.job.job_id for entry in (*plan.running, *plan.queued) if entry.target and entry.job.user == user)
    return tuple(islice(inside, MAX_HOLDERS))


def _room_words(entry: Entry, room: int, behind: str | None) -> str:
    job = entry.job
    needs = f"Needs {count_text(job.min_workers, 'worker')} of {entry.shape.words} each"
    if behind is not None:
        return f"{needs}; to start now would delay {behind}, which is before it and whose start is reserved."
    return (
        f"{needs}; {room} can be had by shrinking others, the rest is at the minima of running jobs. "
        f"A priority above {job.priority} may preempt, more nodes help always."
    )
