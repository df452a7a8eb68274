"""How many micro-batches a pipeline schedule needs, and how many stages it has. Pure; used by the legality rules, the
planner and the engine, so that all three use the same numbers.

Requirements of torch 2.13 (torch/distributed/pipelining/schedules.py):

    gpipe               nothing
    1f1b                at least as many micro-batches as stages
    interleaved_1f1b    a multiple of the number of rounds, max(1, micro-batches // pp)
    zbv                 nothing: it plans 2 pp - 1 time slots, and skips those without a micro-batch
    dualpipev           at least as many micro-batches as stages, which are 2 pp

If a rank has fewer micro-batches, padding micro-batches of weight zero are added: they cost time, but are no error.
"""

from __future__ import annotations

from shoal_workers.contract.layout import Layout, Schedule

MAX_PADDING = 4
"""A layout is refused if its pipeline needs more than this many times the real micro-batches."""


def num_stages(layout: Layout) -> int:
    """Stages over all pipeline ranks."""
    return len(layout.stages) or layout.pp


def longest_share(layout: Layout, num_micro_batches: int) -> int:
    """Real micro-batches of the data rank that has the most."""
    return -(-num_micro_batches // layout.num_data_ranks)


def micro_batches_fed(layout: Layout, num_micro_batches: int) -> int:
    """Forward and backward passes of every rank in one step, padding included."""
    share = longest_share(layout, num_micro_batches)
    if layout.pp == 1:
        return share
    return fed(layout.schedule, layout.pp, num_stages(layout), share)


def fed(schedule: Schedule, pp: int, stages: int, share: int) -> int:
    """The smallest number of micro-batches, at least `share`, that the schedule accepts."""
    match schedule:
        case Schedule.GPIPE | Schedule.ZERO_BUBBLE_V:
            return share
        case Schedule.ONE_F_ONE_B | Schedule.DUAL_PIPE_V:
            return max(share, stages)
        case Schedule.INTERLEAVED:
            rounds = max(1, share // pp)
            # as many rounds as now, each a little longer; or one more round of pp each
            return min(-(-share // rounds) * rounds, max(share, (rounds + 1) * pp))
