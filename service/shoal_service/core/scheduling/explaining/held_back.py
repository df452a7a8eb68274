"""Why a running job has fewer workers than its `elasticity.max_workers`, in plain words.

`reasons` has the words for what changes; without these here, a growth that is left out would be refused silently. The
answer is for the outcome of the decisions of a pass (`decide.after`), so it is about the grants that people see.
Pure. Called by the control loop beside the policy, and not by the simulator, which has no readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.quantities import count_text, duration_text
from shoal_service.core.scheduling.curves import hull
from shoal_service.core.scheduling.estimates import seconds_left
from shoal_service.core.scheduling.explaining.clusters import in_cluster
from shoal_service.core.scheduling.explaining.reasons import names_of, percent, workers_of
from shoal_service.core.scheduling.gains import HORIZON_S, pays
from shoal_service.core.scheduling.market import MarketJob, MarketState
from shoal_service.core.scheduling.plan import Entry, Plan


class GrowthLimit(StrEnum):
    """What keeps a running job at its number of workers."""

    NO_FASTER = "no_faster"
    """By its throughput curve it trains no faster with more workers."""
    QUOTA = "quota"
    """The limit of its project."""
    NO_ROOM = "no_room"
    """Its nodes are full: with the minima of jobs, and with what others have reserved."""
    OTHERS_GAIN_MORE = "others_gain_more"
    """Other jobs hold workers above their minima, and these add more there."""
    PAUSE_COSTS_MORE = "pause_costs_more"
    """There is room, and the change would cost more time than it saves."""
    SOON = "soon"
    """There is room: the next decision may use it."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A running job with fewer workers than it may have."""

    job_id: str
    workers: int
    """Granted."""
    max_workers: int
    limit: GrowthLimit
    reason: str


def held_back(state: MarketState, now: float) -> list[HeldBack]:
    """One answer for each running job with a grant below its `max_workers`; those that pause or end are left out.

    `state`: the market once the decisions are in effect. Takes about half as long as a decision.
    """
    plan = Plan(state, now)
    for entry in (*plan.leaving, *plan.running):
        workers = max(entry.job.granted, entry.job.held) if entry.job.is_leaving else entry.job.granted
        if workers:
            plan.keep(entry, plan.stay(entry, workers), workers)
    short = [entry for entry in plan.running if entry.job.granted < entry.job.max_workers]
    spare = [entry for entry in plan.running if entry.job.granted > entry.job.min_workers] if short else []
    answers = []
    for entry in short:
        limit, reason = _why(entry, spare, in_cluster(plan, entry.shape.cluster))
        answers.append(HeldBack(entry.job.job_id, entry.job.granted, entry.job.max_workers, limit, reason))
    return answers


def _why(entry: Entry, spare: Sequence[Entry], where: str) -> tuple[GrowthLimit, str]:
    job, have = entry.job, entry.job.granted
    if have >= job.min_workers and not hull(job.curve, have, job.max_workers):
        words = f"By what was predicted and measured, it trains no faster with more than {workers_of(have)}."
        return GrowthLimit.NO_FASTER, words
    allowed = entry.share.room()
    if allowed <= 0:
        return GrowthLimit.QUOTA, _quota_words(entry)
    reach = have + int(min(entry.shape.free(job.max_workers - have), allowed, job.max_workers - have))
    segments = hull(job.curve, have, reach) if reach > have else ()
    if not segments:
        return _full(entry, spare, where)
    size = segments[-1][0]
    if have >= job.min_workers and not pays(job, size):
        return GrowthLimit.PAUSE_COSTS_MORE, _pause_words(job, size)
    words = f"There is room for {workers_of(size - have)} more ({percent(job, size)}): it may grow soon."
    return GrowthLimit.SOON, words


def _quota_words(entry: Entry) -> str:
    limited = [(one.project.limit, one) for one in entry.share.path if one.project.limit is not None]
    limit, share = min(limited, key=lambda pair: pair[0] - pair[1].used)
    return (
        f"Project {share.project.name} has {share.used} of the {count_text(limit, 'worker')} that "
        "it may have (its limit)."
    )


def _full(entry: Entry, spare: Sequence[Entry], where: str) -> tuple[GrowthLimit, str]:
    others = [one for one in spare if one is not entry and one.shape.overlaps(entry.shape)]
    if not others:
        words = (
            f"The nodes that it may use{where} have no room for another worker of {entry.shape.words}: all is at the "
            "minima of jobs, or reserved by others. More nodes help."
        )
        return GrowthLimit.NO_ROOM, words
    above = sum(one.job.granted - one.job.min_workers for one in others)
    hold, adds = "holds" if len(others) == 1 else "hold", "adds" if above == 1 else "add"
    names = names_of(tuple(one.job.job_id for one in others))
    words = (
        f"No worker of {entry.shape.words} is free{where}. {names} {hold} {above} above the minimum, which {adds} more "
        f"there than here. A priority above {entry.job.priority} weighs more, and more nodes help."
    )
    return GrowthLimit.OTHERS_GAIN_MORE, words


def _pause_words(job: MarketJob, size: int) -> str:
    horizon_s = min(HORIZON_S, seconds_left(job, size))
    saved_s = horizon_s * (job.curve.rate(size) / job.curve.rate(job.granted) - 1)
    saves = f"With {count_text(size, 'worker')} it would save {duration_text(saved_s)}"
    pause = duration_text(job.switch_s)
    costs = f"and the change pauses it for {pause}. To grow all the same, raise elasticity.min_workers."
    if horizon_s < HORIZON_S:
        left = duration_text(seconds_left(job, job.granted))
        return f"It ends in about {left}. {saves} of that, {costs}"
    return f"{saves} in the next {duration_text(horizon_s)}, {costs}"
