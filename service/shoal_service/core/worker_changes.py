"""How the workers of jobs change over time: from whom a job gets them, and to whom they go.

The events of each job say what the scheduler gave and took at one time (`Change`). What it took from one job for
another one is recorded with the decision. Workers that come free when a job ends, pauses or returns to the queue have
no receiver until a later decision gives them to a job. `connected` joins the two: it goes through the changes in their
order and keeps, for each cluster, the workers that came free less than FRESH_S ago. Older ones, and those of nodes that
join, are only called free: the events do not say where they came from.

Pure; store/timeline.py calls it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

FRESH_S = 60.0
"""A job that gets free workers this long after another one has left them, or earlier, got them because of that."""


class ChangeKind(StrEnum):
    """What happened to the workers of a job."""

    START = "start"
    """The scheduler started the job."""
    GROW = "grow"
    SHRINK = "shrink"
    PREEMPT = "preempt"
    """The scheduler took all of them; the job returns to the queue."""
    LEAVE = "leave"
    """The job ended, was paused, or its attempt was lost: its workers are free."""
    LOST = "lost"
    """Workers of the group were lost; the grant stays."""
    RECOVERED = "recovered"
    """The group has other workers after an incident; the grant stays."""


_TAKES = frozenset({ChangeKind.START, ChangeKind.GROW})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the workers of one job."""

    at: float
    job: str
    kind: ChangeKind
    before: int
    after: int
    others: tuple[tuple[str, int], ...] = ()
    """The jobs that give or get workers by the same decision, and how many."""
    cluster: str = ""
    reason: str = ""
    words: str = ""
    freed_by: tuple[tuple[str, int], ...] = ()
    """Jobs that had left workers shortly before, and how many of these this one got. Filled in by `connected`."""
    taken_by: tuple[tuple[str, int], ...] = ()
    """Jobs that got workers of this one shortly after it had left them. Filled in by `connected`."""

    @property
    def free(self) -> int:
        """Workers that were free before, or are free afterwards. 0 for what is no decision about the grant."""
        if self.kind in (ChangeKind.LOST, ChangeKind.RECOVERED):
            return 0
        return max(0, abs(self.after - self.before) - sum(workers for _, workers in self.others))


@dataclass(slots=True)
class _Left:
    """Workers that a job has left, as far as no other job got them."""

    change: int
    job: str
    workers: int
    at: float


def connected(changes: Iterable[Change]) -> list[Change]:
    """The changes in the order of their times, the ones that free workers first, with `freed_by` and `taken_by`."""
    ordered = sorted(
        changes, key=lambda worker_change: (worker_change.at, worker_change.kind in _TAKES, worker_change.job)
    )
    left: dict[str, deque[_Left]] = defaultdict(deque)
    """By cluster, the newest last."""
    taken: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for index, change in enumerate(ordered):
        there = left[change.cluster]
        while there and there[0].at < change.at - FRESH_S:
            there.popleft()
        if change.kind is ChangeKind.LEAVE:
            there.append(_Left(index, change.job, change.free, change.at))
        elif change.kind in _TAKES:
            workers_taken = _take(there, change.free)
            for worker_change, workers in workers_taken:
                taken[worker_change.change].append((change.job, workers))
            ordered[index] = replace(
                change, freed_by=tuple((worker_change.job, workers) for worker_change, workers in workers_taken)
            )
    return [
        replace(worker_change, taken_by=tuple(taken[index])) if taken[index] else worker_change
        for index, worker_change in enumerate(ordered)
    ]


def _take(there: deque[_Left], workers: int) -> list[tuple[_Left, int]]:
    """Take workers that were left, the newest first: the scheduler decides about them within seconds."""
    taken = []
    while workers > 0 and there:
        newest = there[-1]
        number = min(workers, newest.workers)
        if number:
            taken.append((newest, number))
        newest.workers -= number
        workers -= number
        if not newest.workers:
            there.pop()
    return taken
