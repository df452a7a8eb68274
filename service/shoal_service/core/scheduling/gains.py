"""Who gets the workers that no minimum needs: each goes where it adds most, by the jobs' throughput curves.

    gain = weight of the job x samples per second that the worker adds / samples per second of a worker at the minimum

The weight is heSRPT's (Berg, Vesilo, Harchol-Balter, 2020): it grows slowly with the number of jobs that have more work
left, so jobs that end soon get more, and no job is stopped for it. A priority multiplies the weight. Curves need not be
concave: workers are given in the steps of the curve's upper hull, so that a size which is slower than a smaller one is
never used. Moves are damped: workers that a job has count more than those that it would get.
Called by `decide`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container
from functools import lru_cache
from itertools import pairwise

from shoal_service.core.scheduling.market import MarketJob, seconds_left, workers_for_deadline
from shoal_service.core.scheduling.plan import Entry, Plan, Share
from shoal_service.core.scheduling.room import count

Q = 1.3
"""The exponent 1 / (1 - p) of heSRPT for a throughput of workers^p. 1 ignores the length of jobs, infinity is SRPT. A
larger value favours the mean over the 99th percentile; docs/scheduling.md has the comparison. Measured curves are
flatter at their ends than any power, which the gains account for already."""

DEADLINE_WEIGHT = 1e6
"""Weight of the workers without which a job misses its deadline."""

HORIZON_S = 120.0
"""A move has to pay back within this time or the rest of the job: by then other jobs have come and gone."""

KEEP = 0.1
"""A worker moves only if it adds more elsewhere, by at least this share."""

PAUSES = 4.0
"""Weight of the pause in the gain that a move needs. That gain grows by this number times the pause's share of the
horizon: both jobs pause, and may pause again."""

SETTLE_S = 10.0
"""For this time after a move, a job needs more gain for the next one; what is added falls to 0."""

SETTLE = 0.5
"""Share of the gain that a move needs in addition just after another move; see SETTLE_S."""

PINNED = 1e9
"""Bonus of workers that a job keeps whatever they would add elsewhere: a move just now, or a pause that cannot pay."""


def divide_rest(plan: Plan) -> None:
    """Give out what is free, first within what each project is entitled to, then to anybody who gains."""
    entries = [entry for entry in plan.running + plan.queued if entry.target >= entry.job.min_workers > 0]
    has_room = {shape: shape.free(1) > 0 for shape in plan.room.shapes}
    takers = {entry for entry in entries if has_room[entry.shape] or entry.target < _kept(entry.job)}
    if not takers:
        return
    weights = _weights(entries, takers)
    offers = [_Offer(entry, weights[entry], plan.now) for entry in entries if entry in takers]
    if len(plan.shares.all) > 1:
        _entitle(plan, entries)
        deferred = _hand_out(plan, offers, lambda share: min(share.room(), share.entitled - share.own_used))
        _hand_out(plan, deferred, Share.room)
    else:
        _hand_out(plan, offers, Share.room)


def _weights(entries: list[Entry], takers: Container[Entry]) -> dict[Entry, float]:
    """Weight of one sample per second for each taker: heSRPT's weight by rank, longest job first, times the
    priority's."""
    ranked = sorted([(-entry.job.work_s, entry.job.priority, entry.job.job_id, entry) for entry in entries])
    by_rank = rank_weights(1 << len(ranked).bit_length())
    return {
        entry: weight * entry.job.division[1]
        for (*_, entry), weight in zip(ranked, by_rank, strict=False)
        if entry in takers
    }


def _kept(job: MarketJob) -> int:
    """Number of workers that the job has and may keep."""
    return min(job.granted, job.max_workers)


@lru_cache(maxsize=32)
def rank_weights(number: int) -> tuple[float, ...]:
    """heSRPT's weights by rank, the longest job first."""
    powers = [rank**Q for rank in range(number + 1)]
    return tuple((power - below) ** (1 / Q) for below, power in pairwise(powers))


def _entitle(plan: Plan, entries: list[Entry]) -> None:
    for share in plan.shares.all:
        share.own_demand = share.own_used
    for entry in entries:
        segments = entry.job.division[0]
        entry.share.own_demand += max(0, (segments[-1][0] if segments else entry.job.min_workers) - entry.target)
    placed = sum(share.own_used for share in plan.shares.all)
    free: dict[str, int] = {}
    for shape in {id(entry.shape): entry.shape for entry in entries}.values():
        free[shape.cluster] = max(free.get(shape.cluster, 0), shape.free())
    plan.shares.entitle(placed + sum(free.values()))


class _Offer:
    """The next segment of a job's hull as an item of the heap, from which the most gain comes first."""

    __slots__ = ("bonus", "entry", "gain", "kept", "needed", "segment", "segments", "until", "weight")

    def __init__(self, entry: Entry, weight: float, now: float) -> None:
        job = entry.job
        self.entry = entry
        self.weight = weight
        self.segments = job.division[0]
        self.segment = 0
        self.kept = _kept(job)
        self.bonus = keep_bonus(job, now) if self.kept > entry.target else 1.0
        self.needed = workers_for_deadline(job, now) if job.finish_by is not None else 0
        self.until = 0
        self.gain = 0.0

    def price(self) -> bool:
        """Move to the segment at the job's target; False if none is left."""
        target = self.entry.target
        while self.segment < len(self.segments) and self.segments[self.segment][0] <= target:
            self.segment += 1
        if self.segment == len(self.segments):
            return False
        until, gain = self.segments[self.segment]
        gain *= self.weight
        if target < self.kept:
            until = min(until, self.kept)
            gain *= self.bonus
        if target < self.needed:
            until = min(until, self.needed)
            gain += DEADLINE_WEIGHT * self.weight
        self.until, self.gain = until, gain
        return True


def _hand_out(plan: Plan, offers: list[_Offer], room_of: Callable[[Share], float]) -> list[_Offer]:
    """Give workers to the offers, the most gain first. Return the offers that their project's room did not allow."""
    heap = [(-offer.gain, offer.entry.order, offer) for offer in offers if offer.price()]
    heapq.heapify(heap)
    deferred: list[_Offer] = []
    while heap:
        _, order, offer = heap[0]
        entry, shape = offer.entry, offer.entry.shape
        target = entry.target
        stays = target < offer.kept
        if shape.is_full and not stays:
            heapq.heappop(heap)
            continue
        wanted = offer.until - target
        allowed = int(min(wanted, room_of(entry.share)))
        if allowed <= 0:
            deferred.append(offer)
            heapq.heappop(heap)
            continue
        sites = plan.stay(entry, allowed) if stays else shape.take(allowed)
        taken = count(sites)
        # a part of a segment of the hull may be slower than what the job has: the curve is below the hull there
        if taken < wanted and entry.job.curve.rate(target + taken) <= entry.job.curve.rate(target):
            plan.room.give_back(entry.shape, sites)
            heapq.heappop(heap)
            continue
        entry.target += taken
        entry.sites = entry.sites + sites
        entry.share.add(taken)
        if taken == wanted and offer.price():
            heapq.heapreplace(heap, (-offer.gain, order, offer))
        else:
            heapq.heappop(heap)
            if taken == allowed < wanted:
                deferred.append(offer)
    return deferred


def settle(plan: Plan) -> None:
    """Take back growth that does not pay; what is free then stays with those that would have given it.

    No job grows while the workers of another one have no place in this booking and are on none yet: they need what
    seems to be free.
    """
    is_booked = not any(entry.is_below_minimum and plan.is_unplaced(entry) for entry in plan.running)
    moved = [entry for entry in plan.running if entry.target != entry.job.granted]
    for entry in moved:
        job = entry.job
        if entry.target > job.granted >= job.min_workers and not (is_booked and pays(job, entry.target)):
            _reduce(plan, entry, entry.target - job.granted)
    for entry in moved:
        most = min(entry.job.granted, entry.job.max_workers) - entry.target
        if most > 0 and not entry.is_below_minimum and entry.share.room() > 0:
            sites = plan.stay(entry, int(min(most, entry.share.room())))
            workers = count(sites)
            if workers and entry.job.curve.rate(entry.target + workers) > entry.job.curve.rate(entry.target):
                entry.sites = entry.sites + sites
                entry.target += workers
                entry.share.add(workers)
            else:
                plan.room.give_back(entry.shape, sites)


def _reduce(plan: Plan, entry: Entry, workers: int) -> None:
    entry.target -= workers
    entry.share.add(-workers)
    sites = []
    while workers > 0:
        free, here = entry.sites.pop()
        back = min(here, workers)
        sites.append((free, back))
        if here > back:
            entry.sites.append((free, here - back))
        workers -= back
    plan.room.give_back(entry.shape, sites)


def keep_bonus(job: MarketJob, now: float) -> float:
    """The factor by which a worker that the job has counts more than the same worker elsewhere."""
    since = math.inf if job.moved_at is None else now - job.moved_at
    if since < 0:  # the clock was set back since
        since = math.inf
    if since <= 2 * job.switch_s:
        return PINNED
    horizon = min(HORIZON_S, seconds_left(job, job.granted))
    if horizon <= PAUSES * job.switch_s:
        return PINNED
    recent = SETTLE * max(0.0, 1 - since / SETTLE_S)
    return 1 + KEEP + recent + PAUSES * job.switch_s / horizon


def pays(job: MarketJob, workers: int) -> bool:
    """Return whether growing to this size wins more samples than its pause costs, before the horizon ends."""
    before, after = job.curve.rate(job.granted), job.curve.rate(workers)
    if before <= 0 or after <= before:
        return after > before
    horizon = min(HORIZON_S, seconds_left(job, workers))
    return (after - before) * horizon > before * job.switch_s
