"""Which moves pay: a change of the world size costs a pause, and jobs that moved lately stay where they are.

Called by `gains` and `decide`.
"""

from __future__ import annotations

import math

from shoal_service.core.scheduling.estimates import seconds_left
from shoal_service.core.scheduling.market import MarketJob

HORIZON_S = 120.0
"""A move has to pay back within this time or the rest of the job: by then other jobs have come and gone."""

KEEP = 0.05
"""A worker moves only if it adds this much more elsewhere."""

PAUSES = 4.0
"""... and more by so many times the share of the horizon that the pause takes: both jobs pause, and may again."""

SETTLE_S = 10.0
"""A job that moved needs more gain for the next move, falling to the usual over this time."""

SETTLE = 0.5

PINNED = 1e9


def keep_bonus(job: MarketJob, now: float) -> float:
    """The factor by which a worker that the job has counts more than the same worker elsewhere."""
    since = math.inf if job.moved_at is None else now - job.moved_at
    if since <= 2 * job.switch_s:
        return PINNED
    horizon = min(HORIZON_S, seconds_left(job, job.granted))
    if horizon <= PAUSES * job.switch_s:
        return PINNED
    recent = SETTLE * max(0.0, 1 - since / SETTLE_S)
    return 1 + KEEP + recent + PAUSES * job.switch_s / horizon


def pays(job: MarketJob, workers: int) -> bool:
    """Growing to this size wins more samples than its pause costs, before the horizon ends."""
    before, after = job.curve.rate(job.granted), job.curve.rate(workers)
    if before <= 0 or after <= before:
        return after > before
    horizon = min(HORIZON_S, seconds_left(job, workers))
    return (after - before) * horizon > before * job.switch_s
