"""Slow-downs: steps take longer than they did, and why. Called with each report of a step.

    excess of a step = its time - FACTOR x the median of the normal steps before
    sum of the excesses of consecutive slow steps >= THRESHOLD_S, and two slow steps  ->  the group has slowed down
    a checkpoint keeps one rank for much longer than the others                       ->  at once

              computes   makes batches   waits for a CPU   checkpoint   waits for others
    rank 0     40 ms          1 ms              0 ms          0 ms          260 ms
    rank 1    300 ms        262 ms              1 ms          0 ms            0 ms         <- suspected: data
    rank 2     41 ms          1 ms              0 ms          0 ms          259 ms

A rank is suspected if its own work, without waiting, has grown by much more than that of the others. If the work of all
ranks has grown, none is suspected, but the reason is named. If only the waiting has grown, the network is the reason,
and `links` says whose.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_service.core.quantities import duration_text
from shoal_workers.contract.suspects import Resource, Suspect
from shoal_workers.contract.worker_reports import StepReport

FACTOR = 1.5
"""A step is slow if it takes this many times the median of normal steps."""
THRESHOLD_S = 0.5
_MOST_NORMAL = 32
_LEAST_NORMAL = 5
_MOST_SLOW = 32
_SKIPPED = 2
"""First steps of a generation that are no measure: they touch new memory."""
_LOOK_AGAIN = 8
"""Slow steps after which a slow-down that lasts is judged again: another fault may have come."""
_STALL_S = 1.0
"""A checkpoint that keeps a rank for this much longer than the others is a slow-down of its own."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank in one step, or means over steps. Seconds."""

    compute_s: float
    data_s: float
    cpu_wait_s: float
    saving_s: float

    @property
    def own_s(self) -> float:
        """Seconds in which the rank did not wait for others."""
        return self.compute_s + self.saving_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    step_s: float
    """Seconds of the step without validation."""
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """What is remembered of one generation."""

    generation: int = 0
    num_steps: int = 0
    normal: tuple[StepTimes, ...] = ()
    slow: tuple[StepTimes, ...] = ()
    """The slow steps since the last normal one."""
    excess_s: float = 0.0
    is_named: bool = False
    """The slow-down that lasts has been reported."""
    suspect: Suspect | None = None
    """Whom the last report of it suspected."""
    num_slow: int = 0
    """Slow steps since it was reported."""


@dataclass(frozen=True, slots=True)
class SlowDown:
    """A finding. `suspect` is None if only the waiting has grown: the links have to be looked at."""

    step: int
    usual_s: float
    now_s: float
    suspect: Suspect | None


def step_done(pace: Pace, report: StepReport) -> tuple[Pace, SlowDown | None]:
    """The pace after this step, and a slow-down that it has made certain."""
    if report.generation != pace.generation:
        pace = Pace(generation=report.generation)
    pace = replace(pace, num_steps=pace.num_steps + 1)
    times = _times(report)
    if times is None or pace.num_steps <= _SKIPPED:
        return pace, None
    if len(pace.normal) < _LEAST_NORMAL:
        return replace(pace, normal=(*pace.normal, times)), None
    usual = _typical(pace.normal)
    if _is_stall(times, usual):
        found = None if pace.is_named else _found(report, usual, (times,))
        return replace(pace, slow=(times,), is_named=True, num_slow=0), found
    if times.step_s <= FACTOR * usual.step_s:
        normal = (*pace.normal, times)[-_MOST_NORMAL:]
        return replace(pace, normal=normal, slow=(), excess_s=0.0, is_named=False), None
    slow = (*pace.slow, times)[-_MOST_SLOW:]
    excess_s = pace.excess_s + times.step_s - FACTOR * usual.step_s
    pace = replace(pace, slow=slow, excess_s=excess_s, num_slow=pace.num_slow + 1)
    if pace.is_named:
        return _looked_again(pace, report, usual)
    if excess_s < max(THRESHOLD_S, usual.step_s) or len(slow) < 2:
        return pace, None
    found = _found(report, usual, slow)
    return replace(pace, is_named=True, suspect=found.suspect, num_slow=0), found


def _looked_again(pace: Pace, report: StepReport, usual: StepTimes) -> tuple[Pace, SlowDown | None]:
    """A rank that was not suspected before is reported."""
    if pace.num_slow < _LOOK_AGAIN:
        return pace, None
    pace, found = replace(pace, num_slow=0), _found(report, usual, pace.slow[-_LOOK_AGAIN:])
    if found.suspect is None or not found.suspect.ranks or _is_same(found.suspect, pace.suspect):
        return pace, None
    return replace(pace, suspect=found.suspect), found


def _is_same(one: Suspect, other: Suspect | None) -> bool:
    return other is not None and (one.resource, one.ranks) == (other.resource, other.ranks)


def whose_work_grew(slow: Sequence[StepTimes], usual: StepTimes) -> Suspect | None:
    """The suspect whose own work takes longer than usual. None: the ranks wait longer for each other than before,
    although each does what it did."""
    now = _mean(slow)
    grown = [rank.own_s - before.own_s for rank, before in zip(now.ranks, usual.ranks, strict=True)]
    excess = max(now.step_s - usual.step_s, 1e-9)
    starved = _who_has_no_cpu(now, usual, excess)
    if starved is not None:
        return starved
    first = max(range(len(grown)), key=lambda rank: grown[rank])
    others = statistics.median(g for rank, g in enumerate(grown) if rank != first) if len(grown) > 1 else 0.0
    if grown[first] - others >= 0.4 * excess:
        limit = others + 0.5 * (grown[first] - others)
        ranks = tuple(rank for rank, g in enumerate(grown) if g >= limit)
        return _of_ranks(ranks, first, now, usual)
    if others >= 0.5 * excess:
        resource, share = _resource(now.ranks[first], usual.ranks[first])
        words = f"all ranks work {duration_text(others)} a step longer than before{share}"
        return Suspect(resource=resource, evidence=(words, _summary(now, usual)))
    return None


def _who_has_no_cpu(now: StepTimes, usual: StepTimes, excess: float) -> Suspect | None:
    """A rank whose training thread waits for a CPU much more than those of the others. Its own work may hardly have
    grown: while it waits for others, the threads of its process group have no CPU either."""
    waits = [rank.cpu_wait_s - before.cpu_wait_s for rank, before in zip(now.ranks, usual.ranks, strict=True)]
    first = max(range(len(waits)), key=lambda rank: waits[rank])
    others = [wait for rank, wait in enumerate(waits) if rank != first]
    if not others or waits[first] - statistics.median(others) < 0.25 * excess or waits[first] < 2 * max(others):
        return None
    own = duration_text(now.ranks[first].cpu_wait_s)
    most = duration_text(max(one.cpu_wait_s for rank, one in enumerate(now.ranks) if rank != first))
    words = f"rank {first} is ready to run and has no CPU for {own} a step, any other for {most} at most"
    return Suspect(resource=Resource.CPU, ranks=(first,), evidence=(words, _summary(now, usual)))


def _of_ranks(ranks: tuple[int, ...], first: int, now: StepTimes, usual: StepTimes) -> Suspect:
    resource, share = _resource(now.ranks[first], usual.ranks[first])
    others = [rank.own_s for number, rank in enumerate(now.ranks) if number not in ranks]
    beside = f", the others {duration_text(statistics.median(others))}" if others else ""
    own, before = duration_text(now.ranks[first].own_s), duration_text(usual.ranks[first].own_s)
    words = f"rank {first} works {own} a step{beside}, and worked {before} before{share}"
    return Suspect(resource=resource, ranks=ranks, evidence=(words, _summary(now, usual)))


def _resource(now: RankTimes, usual: RankTimes) -> tuple[Resource, str]:
    """What the additional work of a rank consists of, and the words for it."""
    grown = max(now.own_s - usual.own_s, 1e-9)
    saving, data = now.saving_s - usual.saving_s, now.data_s - usual.data_s
    waiting = now.cpu_wait_s - usual.cpu_wait_s
    if saving >= 0.5 * grown:
        return Resource.STORAGE, f"; a checkpoint keeps it for {duration_text(now.saving_s)}"
    if waiting >= 0.4 * grown:
        return Resource.CPU, f"; for {duration_text(now.cpu_wait_s)} it is ready to run and has no CPU"
    if data >= 0.5 * grown:
        return Resource.DATA, f"; {duration_text(now.data_s)} of it to make batches"
    return Resource.COMPUTE, ""


def _is_stall(times: StepTimes, usual: StepTimes) -> bool:
    """A checkpoint has kept a rank for longer than the others."""
    saving = [rank.saving_s for rank in times.ranks]
    if len(saving) < 2 or max(saving) < _STALL_S:
        return False
    return max(saving) - statistics.median_low(saving) >= max(_STALL_S, 2 * FACTOR * usual.step_s)


def _found(report: StepReport, usual: StepTimes, slow: tuple[StepTimes, ...]) -> SlowDown:
    return SlowDown(
        step=report.step, usual_s=usual.step_s, now_s=_mean(slow).step_s, suspect=whose_work_grew(slow, usual)
    )


def _times(report: StepReport) -> StepTimes | None:
    """None: a worker of an older release has not measured them."""
    columns = (report.compute_s, report.data_s, report.cpu_wait_s, report.saving_s)
    if not report.compute_s or len({len(column) for column in columns}) > 1:
        return None
    ranks = tuple(RankTimes(*values) for values in zip(*columns, strict=True))
    return StepTimes(max(0.0, report.step_s - report.validating_s), ranks)


def _typical(steps: Sequence[StepTimes]) -> StepTimes:
    """Medians. A checkpoint that is usual is none of the excess: of its times the largest counts."""
    ranks = tuple(
        RankTimes(
            statistics.median(one.compute_s for one in of_rank),
            statistics.median(one.data_s for one in of_rank),
            statistics.median(one.cpu_wait_s for one in of_rank),
            statistics.median(one.saving_s for one in of_rank),
        )
        for of_rank in zip(*(step.ranks for step in steps), strict=True)
    )
    return StepTimes(statistics.median(step.step_s for step in steps), ranks)


def _mean(steps: Sequence[StepTimes]) -> StepTimes:
    ranks = tuple(
        RankTimes(
            statistics.fmean(one.compute_s for one in of_rank),
            statistics.fmean(one.data_s for one in of_rank),
            statistics.fmean(one.cpu_wait_s for one in of_rank),
            statistics.fmean(one.saving_s for one in of_rank),
        )
        for of_rank in zip(*(step.ranks for step in steps), strict=True)
    )
    return StepTimes(statistics.fmean(step.step_s for step in steps), ranks)


def _summary(now: StepTimes, usual: StepTimes) -> str:
    return f"a step takes {duration_text(now.step_s)} instead of {duration_text(usual.step_s)}"
