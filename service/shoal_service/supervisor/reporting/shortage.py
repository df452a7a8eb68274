"""Why the group has fewer workers than the scheduler has granted, for people. Pure; `status` shows it.

It repeats no decision: it reads what `group/switching`, `group/silent_nodes` and `worker_pool` have left in the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.core.attempt import departures
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Running
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.quantities import count_text


@dataclass(frozen=True, slots=True)
class Shortage:
    reason: str
    """For programs: the reason of the condition WorkersReady."""
    message: str


def shortage(state: Attempt, now: float) -> Shortage | None:
    """None: the group has all granted workers. All reasons that apply are named; the first one is the code."""
    have = len(state.group.workers) if state.group_active else 0
    if have >= state.target.granted:
        return None
    outside = [worker for worker in state.pool.workers if worker.index not in state.group.ranks or not have]
    found = [*_silent(outside), *_leaving(state, outside), *_starting(outside), *_idle(state, outside, have, now)]
    num_missing = state.target.granted - have - len(outside)
    if num_missing > 0 and not found:
        found.append(Shortage("NotStarted", f"{count_text(num_missing, 'worker')} not started yet"))
    if not found:
        return Shortage("FewerThanGranted", "")
    return Shortage(found[0].reason, "; ".join(one.message for one in found))


def _silent(outside: Sequence[Worker]) -> list[Shortage]:
    """Per node; a worker whose node answers again has still to leave the generation that went on without it."""
    by_node: dict[str, list[Worker]] = {}
    for worker in outside:
        if worker.left_out is not None and worker.info is not None:
            by_node.setdefault(worker.info.node_id, []).append(worker)
    return [
        Shortage("NodeSilent", f"{count_text(len(workers), 'worker')} left out until node {node_id[:12]} answers")
        for node_id, workers in by_node.items()
    ]


def _leaving(state: Attempt, outside: Sequence[Worker]) -> list[Shortage]:
    leaves = [leave for worker in outside if (leave := departures.leave_of(state, worker)) is not None]
    reason = leaves[0].reason if leaves else ""
    return [Shortage("Leaving", f"{count_text(len(leaves), 'worker')} about to leave ({reason})")] if leaves else []


def _starting(outside: Sequence[Worker]) -> list[Shortage]:
    number = sum(not worker.warm for worker in outside)
    if not number:
        return []
    return [Shortage("Starting", f"{count_text(number, 'worker')} starting, or waiting for room on a node")]


def _idle(state: Attempt, outside: Sequence[Worker], have: int, now: float) -> list[Shortage]:
    """Warm, and not used."""
    idle = [w for w in outside if w.is_usable and departures.leave_of(state, w) is None]
    if not idle or not isinstance(state.current, Running):
        return []
    number = count_text(len(idle), "worker")
    kept = state.current.kept_layout_for
    layout = state.group.layout.describe() if state.group.layout is not None else ""
    if kept is not None and kept.num_workers > have:
        return [
            Shortage(
                "LayoutUsesFewer",
                f"{number} idle: for {count_text(kept.num_workers, 'worker')} the planner's layout is "
                f"{layout}, which uses {have} of "
                "them; `shoal plan` shows why, and `parallelism` of the spec overrides it",
            )
        ]
    if now < state.budgets.grow_not_before:
        return [
            Shortage("GrowsLater", f"{number} idle: the group does not grow for a while after a failed save or start")
        ]
    return [Shortage("GrowsSoon", f"{number} warm: the group grows at the next step boundary")]
