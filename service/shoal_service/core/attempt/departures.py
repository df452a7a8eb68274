"""Nodes that must not be used any longer, and workers that are about to be taken away. Pure.

The control plane names nodes (a drain, a probation); a worker reports that it will be taken away (SIGTERM, a preemption
notice). In both cases the group switches away from the worker at a step boundary, so no step is lost.
"""

from __future__ import annotations

import statistics

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.worker import AvoidedNode, Worker


def leave_of(state: Attempt, worker: Worker) -> AvoidedNode | None:
    """Why the worker has to leave, and its deadline; None: it may stay."""
    if worker.leave is not None:
        return worker.leave
    node_id = worker.info.node_id if worker.info is not None else None
    avoided = (one for one in state.target.avoided if one.node_id == node_id and not one.keeps_workers)
    return next(avoided, None)


def is_due(state: Attempt, worker: Worker, now: float) -> bool:
    """Whether the worker's deadline has come, less the time that a switch takes."""
    leave = leave_of(state, worker)
    return leave is not None and leave.deadline is not None and now >= leave.deadline - margin_s(state)


def workers_to_leave(state: Attempt) -> list[Worker]:
    """Workers of the group that must not stay in it, or that stay only while there is no better one."""
    ranks, avoided = state.group.ranks, leaving_nodes(state)
    return [worker for worker in state.pool.workers if worker.index in ranks and has_to_leave(worker, avoided)]


def leaving_nodes(state: Attempt) -> frozenset[str]:
    """Nodes whose workers have to leave."""
    return frozenset(one.node_id for one in state.target.avoided if not one.keeps_workers)


def has_to_leave(worker: Worker, leaving: frozenset[str]) -> bool:
    """Whether the worker has to leave: its node is in `leaving`, or it has given notice, or it is too slow."""
    is_there = worker.info is not None and worker.info.node_id in leaving
    return is_there or worker.leave is not None or worker.slow_until is not None


def why(state: Attempt, worker: Worker) -> str:
    """Why the group switches away from the worker, for people."""
    leave = leave_of(state, worker)
    return f"drain {leave.node_id}: {leave.reason}" if leave is not None else f"replace straggler {worker.worker_id}"


def margin_s(state: Attempt) -> float:
    """Seconds before the deadline at which the switch begins, even if no replacement is warm: two steps, or the grace
    of a script, and a margin."""
    if state.target.is_script:
        return state.config.timeouts.leave_margin_s + state.target.grace_s
    step_s = statistics.median(state.progress.step_times) if state.progress.step_times else 0.0
    return state.config.timeouts.leave_margin_s + 2 * step_s
