"""What people read about a job that waits: its position, who holds what it waits for, and when it is expected to start.

Called by `decide`. Expected starts follow the present rates of running jobs; a job of unknown length promises nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.admission import Obstacle
from shoal_service.core.scheduling.explaining.clusters import in_cluster, room_words
from shoal_service.core.scheduling.market import Wait
from shoal_service.core.scheduling.plan import Claim, Entry, Plan
from shoal_service.core.scheduling.reservations import Ends
from shoal_service.core.scheduling.room import UNLIMITED, Shape
from shoal_service.core.scheduling.shares import Share

MAX_HOLDERS = 5
"""Jobs that are listed at most; a longer list is no help to a reader."""


class Forecast:
    """Expected starts on one shape's nodes: each waiting job takes what comes free after those before it."""

    def __init__(self, plan: Plan, shape: Shape, ends: Ends) -> None:
        self._coming = ends.of(shape)
        self._seen: deque[tuple[float, int, str]] = deque()
        """Those of `_coming` that `at` has looked at."""
        self._last: tuple[str, ...] = ()
        """The job that ended last in this forecast."""
        self._at = plan.now
        self.shape = shape
        self.room = self.free = shape.free()

    def at(self, workers: int) -> float:
        """The time that `place` would return, infinite if it is not known. Changes nothing."""
        if self.free >= workers or self.free < 0:
            return self._at if self.free >= workers else math.inf
        free = self.free
        for at, freed, _ in self._seen:
            free += freed
            if free >= workers:
                return at
        for following in self._coming:
            self._seen.append(following)
            free += following[1]
            if free >= workers:
                return following[0]
        return math.inf

    def place(self, workers: int) -> tuple[float | None, tuple[str, ...]]:
        """Takes `workers` workers for a waiting job. Returns when they are free, beyond those that earlier calls have
        taken, and the jobs that free them."""
        if self.free >= workers:
            self.free -= workers
            return self._at, self._last
        if self.free < 0:
            return None, self._last
        holders: list[str] = []
        while self.free < workers:
            following = self._seen.popleft() if self._seen else next(self._coming, None)
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
        forecasts, reason = words.room(entry, obstacle)
        if len(forecasts) == 1:
            at, holders = forecasts[0].place(job.min_workers)
        else:
            at, holders = _place(forecasts, job.min_workers)
        decisions.append(Wait(job.job_id, reason, position, holders, at))
    return decisions


def _place(forecasts: Sequence[Forecast], workers: int) -> tuple[float | None, tuple[str, ...]]:
    """In the cluster where they fit first. If that is known of none, nothing is known of those after them either."""
    times = [one.at(workers) for one in forecasts]
    soonest = min(times)
    if soonest < math.inf:
        return forecasts[times.index(soonest)].place(workers)
    holders = [one.place(workers)[1] for one in forecasts]
    return None, next(filter(None, holders), ())


class _Words:
    """What is equal for jobs that ask for the same; looked up once in a decision."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ends: Ends | None = None
        self._forecasts: dict[int, Forecast] = {}
        """By identity of the shape."""
        self._rooms: dict[tuple[Claim, str | None], tuple[list[Forecast], str]] = {}
        self._holders: dict[tuple[Share | None, str, tuple[str, str] | None], tuple[str, ...]] = {}

    def room(self, entry: Entry, obstacle: Obstacle) -> tuple[list[Forecast], str]:
        """The forecasts of the job's start in each cluster that could hold it, and why it does not start now."""
        known = self._rooms.get((entry.claim, obstacle.behind))
        if known is None:
            shapes = [shape for shape in entry.claim.shapes if shape.ever >= entry.job.min_workers]
            forecasts = [self._forecast(shape) for shape in shapes]
            if obstacle.behind is None:
                reason = room_words(self._plan, entry, [(one.shape, one.room) for one in forecasts])
            else:
                reason = _behind_words(entry, obstacle.behind, in_cluster(self._plan, obstacle.cluster))
            known = self._rooms[entry.claim, obstacle.behind] = forecasts, reason
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


def _behind_words(entry: Entry, behind: str, where: str) -> str:
    return (
        f"Needs {count_text(entry.job.min_workers, 'worker')} of {entry.shape.words} each; to start now{where} would "
        f"delay {behind}, which is before it and whose start is reserved."
    )
