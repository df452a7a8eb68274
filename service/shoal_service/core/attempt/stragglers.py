"""Stragglers: a rank that computes much longer than the others in every step delays all of them.

    compute_s > health.straggler_factor x median of the others, for health.straggler_steps steps in a row
        -> an event, and the worker is replaced at a step boundary: by a warm standby, or by an extra worker once that
           is warm; it stays if none becomes warm within Timeouts.start_s

`compute_s` does not contain the time in which a rank waits for others, so only the slow rank is seen. `reports` and
`deadlines` call this; the replacement is a planned switch (`switching`), and no incident.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_service.core.attempt import suspicion
from shoal_service.core.attempt.faults import FAULTS
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.events.workers import StragglerFound, StragglerKept
from shoal_service.core.quantities import count_text
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.worker_reports import StepReport

_PAUSE = 10
"""After a straggler was named, the next one is named no earlier than this many times health.straggler_steps later."""


@dataclass(frozen=True, slots=True)
class StragglerDecision(Decision):
    index: int = -1
    """Index of the straggler; -1: there is none."""


def step_done(turn: Turn, report: StepReport) -> None:
    """Count slow steps by worker, and name the slowest worker once it was slow for health.straggler_steps."""
    slow_steps = count_slow_steps(turn.state, report)
    if slow_steps is not None:
        turn.progress = replace(turn.progress, slow_steps=slow_steps)
        found = find_straggler(turn.state, report)
        if found:
            _name(turn, found.index, report)


def count_slow_steps(state: Attempt, report: StepReport) -> dict[int, int] | None:
    """The number of slow steps in a row of each slow worker, this step included, by worker index; None: the ranks
    cannot be compared."""
    factor, workers = state.target.spec.health.straggler_factor, state.group.workers
    if factor is None or len(report.compute_s) != len(workers) or len(workers) < 2:
        return None
    ordered = sorted(report.compute_s)
    return {
        index: state.progress.slow_steps.get(index, 0) + 1
        for rank, index in enumerate(workers)
        if report.compute_s[rank] > factor * _median_without(ordered, report.compute_s[rank])
    }


def find_straggler(state: Attempt, report: StepReport) -> StragglerDecision:
    """Find the slowest of the workers that were slow for long enough."""
    limit, ranks = state.target.spec.health.straggler_steps, state.group.ranks
    slow = [index for index, steps in state.progress.slow_steps.items() if steps >= limit]
    if not slow:
        return StragglerDecision(
            False, f"no worker was slow for {count_text(limit, 'step')} in a row (health.straggler_steps)"
        )
    if report.step < state.health.no_straggler_before:
        return StragglerDecision(
            False, f"one was named; the next no earlier than step {state.health.no_straggler_before}"
        )
    index = max(slow, key=lambda i: report.compute_s[ranks[i]])
    return StragglerDecision(True, f"slow for {count_text(state.progress.slow_steps[index], 'step')} in a row", index)


def keep_where_no_replacement_came(turn: Turn) -> None:
    """Keep a slow worker if no other one became warm in time: a slow worker is better than none."""
    for worker in turn.pool.workers:
        if worker.slow_until is not None and turn.now >= worker.slow_until and worker.index in turn.group.ranks:
            turn.pool = turn.pool.with_worker(replace(worker, slow_until=None))
            turn.emit(
                StragglerKept(
                    worker_id=worker.worker_id,
                    rank=turn.group.rank_of(worker.index),
                    message=f"no other worker became warm within {turn.config.timeouts.start_s:g} s",
                )
            )


def _name(turn: Turn, index: int, report: StepReport) -> None:
    state = turn.state
    worker = state.pool.worker(index)
    if worker is None or worker.info is None or worker.slow_until is not None:
        return
    rank = state.group.ranks[index]
    node_id = worker.info.node_id
    pause = _PAUSE * state.target.spec.health.straggler_steps
    turn.health = replace(turn.health, no_straggler_before=report.step + pause)
    turn.progress = replace(turn.progress, slow_steps={})
    turn.emit(
        StragglerFound(
            worker_id=worker.worker_id,
            rank=rank,
            node_id=node_id,
            compute_s=report.compute_s[rank],
            median_s=_median_without(sorted(report.compute_s), report.compute_s[rank]),
            step=report.step,
            action="replaced by a spare" if _has_spare(turn, worker) else "an extra worker is started",
        )
    )
    turn.pool = turn.pool.with_worker(replace(worker, slow_until=turn.now + state.config.timeouts.start_s))
    if suspicion.is_alone(state, node_id, besides=index):
        suspicion.suspect(turn, node_id, FAULTS[IncidentCause.STRAGGLER].words)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all values but one that equals `value`. `ordered`: at least two values, rising."""
    at, num_others = bisect_left(ordered, value), len(ordered) - 1

    def other(number: int) -> float:
        return ordered[number if number < at else number + 1]

    return (other((num_others - 1) // 2) + other(num_others // 2)) / 2


def _has_spare(turn: Turn, slow: Worker) -> bool:
    return any(p.index not in turn.group.ranks and p.slow_until is None for p in turn.state.usable if p != slow)
