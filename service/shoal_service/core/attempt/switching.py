"""When a running group stops at the next step boundary: to pause, to shrink, to leave nodes, to grow, to change layout,
to measure another shard level.

`decide` is called after every event. While nothing calls for a switch it only compares numbers. A layout is planned
when there are more usable workers than ranks, or when `parallelism` has changed, and once for each such change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_service.core.attempt import code_update, departures, levels
from shoal_service.core.attempt.commands import RequestYield
from shoal_service.core.attempt.placement import choose, is_settled, next_workers
from shoal_service.core.attempt.plan_layout import PlanLayout
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import PlanInputs, Running, Switching
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events.training import GenerationSwitching
from shoal_service.core.quantities import count_text
from shoal_workers.contract.training_settings import changes


@dataclass(frozen=True, slots=True)
class SwitchDecision(Decision):
    kept_layout_for: PlanInputs | None = None
    """Inputs for which a layout was planned and the group keeps its own; None: none was planned."""


def consider(turn: Turn) -> None:
    """Ask the group to stop at the next step boundary if something calls for it. Called after every event; acts in
    RUNNING only."""
    running = turn.current
    if not isinstance(running, Running):
        return
    is_draining = bool(_workers_to_replace(turn.state, turn.now))
    if is_draining != (running.draining_since is not None):
        running = replace(running, draining_since=turn.now if is_draining else None)
        turn.stay(running)
    decision = decide(turn.state, running, turn.now, turn.plan)
    if decision.kept_layout_for is not None:
        turn.stay(replace(running, kept_layout_for=decision.kept_layout_for))
    reason = decision.reason if decision else levels.consider(turn)
    if reason:
        _switch(turn, reason)


def decide(state: Attempt, running: Running, now: float, plan: PlanLayout) -> SwitchDecision:
    num_workers = len(state.group.workers)
    if state.target.ends_saved:
        return SwitchDecision(True, _why_it_ends(state))
    if state.target.granted < num_workers:
        return SwitchDecision(True, f"shrink {num_workers} -> {state.target.granted}")
    if state.group.settings is not None and (changed := changes(state.group.settings, state.target.settings)):
        return SwitchDecision(True, ", ".join(changed))
    if fault := code_update.why_back(state):
        return SwitchDecision(True, f"the new code is rolled back: {fault}")
    if ready := code_update.readiness(state):
        return SwitchDecision(True, ready.reason)
    drain = drain_decision(state, running, now)
    if drain:
        return SwitchDecision(True, drain.reason)
    return _layout_decision(state, running, now, plan)


def drain_decision(state: Attempt, running: Running, now: float) -> Decision:
    """Whether to switch away from workers that have to leave: once others can take their place, or no others are to be
    expected, and at the latest when their time has come. If fewer than elasticity.min_workers would be left, only
    then."""
    leaving = _workers_to_replace(state, now)
    if not leaving:
        return Decision(False, "no worker of the group has to leave")
    reason = departures.why(state, leaving[0])
    if any(departures.is_due(state, worker, now) for worker in leaving):
        return Decision(True, reason)
    num_next, minimum = len(next_workers(state, now)), max(1, state.target.min_workers)
    if num_next < minimum:
        return Decision(
            False, f"{reason}; without it {num_next} of at least {count_text(minimum, 'worker')} would be left"
        )
    if num_next >= min(state.target.granted, len(state.group.workers)):
        return Decision(True, reason)
    leaves = [departures.leave_of(state, worker) for worker in leaving]
    if any(leave is not None and not leave.is_replaceable for leave in leaves):
        return Decision(True, f"{reason}; no other node has room for a worker that takes its place")
    if _no_worker_is_expected(state, running.draining_since or now, now):
        return Decision(True, reason)
    return Decision(False, f"{reason}; waits for a worker that takes its place")


def _why_it_ends(state: Attempt) -> str:
    if state.target.desired is Desired.PAUSE:
        return "pause"
    if state.target.server_stops:
        return "the server stops"
    to = state.target.moves_to
    return f"it moves to the cluster {to}" if to else "another job gets the workers"


def _layout_decision(state: Attempt, running: Running, now: float, plan: PlanLayout) -> SwitchDecision:
    group, parallelism = state.group, state.target.spec.parallelism
    num_workers, is_changed = len(group.workers), parallelism != group.planned_by
    if state.num_usable <= num_workers and not is_changed:
        return SwitchDecision(False, f"the group has {count_text(num_workers, 'worker')}, and no other is usable")
    if now < state.budgets.grow_not_before:
        return SwitchDecision(False, f"no other layout for {state.budgets.grow_not_before - now:.1f} s after a failure")
    num_next = len(next_workers(state, now))
    can_grow = num_next > num_workers and is_settled(state, now)
    if not can_grow and not is_changed:
        return SwitchDecision(False, f"{count_text(num_next, 'worker')} could train; waiting for the others to start")
    inputs = PlanInputs(num_workers=max(1, num_next), parallelism=parallelism)
    if inputs == running.kept_layout_for:
        return SwitchDecision(False, f"the layout for {count_text(inputs.num_workers, 'worker')} is no better")
    if not num_next:
        return SwitchDecision(False, "no worker is usable")
    choice = choose(state, next_workers(state, now), now, plan)
    if choice.refusal:
        return SwitchDecision(
            False, f"{count_text(inputs.num_workers, 'worker')} cannot train: {choice.refusal}", inputs
        )
    layout = choice.planned.layout
    assert group.layout is not None
    if layout != group.layout:
        if can_grow and layout.world_size > num_workers:
            return SwitchDecision(True, f"grow {num_workers} -> {layout.world_size}")
        if is_changed:
            return SwitchDecision(True, f"relayout {group.layout.describe()} -> {layout.describe()}")
    return SwitchDecision(False, f"the layout for {count_text(inputs.num_workers, 'worker')} is no better", inputs)


def _workers_to_replace(state: Attempt, now: float) -> list[Worker]:
    """Workers of the group that have to leave and would not be in the next group."""
    leaving = departures.workers_to_leave(state)
    if not leaving:
        return []
    following = {worker.index for worker in next_workers(state, now)}
    return [worker for worker in leaving if worker.index not in following]


def _no_worker_is_expected(state: Attempt, since: float, now: float) -> bool:
    """Whether no further worker is expected: none has become warm for a while, and those that are starting have had
    their time."""
    newest = max(since, *(worker.warm_at or 0.0 for worker in state.workers if worker.warm))
    is_starting = any(not worker.warm for worker in state.workers)
    timeouts = state.config.timeouts
    return now - newest >= (timeouts.gather_s if is_starting else timeouts.settle_s)


def _switch(turn: Turn, reason: str) -> None:
    """Ask for a stop at the next step boundary. The snapshot of that step in memory is enough, unless no worker will be
    left to read it from: in a pause, or when the attempt will have to wait for capacity."""
    target, group = turn.target, turn.group
    num_next = len(next_workers(turn.state, turn.now))
    durable = target.ends_saved or not target.keeps_snapshots or num_next < max(1, target.min_workers)
    turn.enter(Switching(since=turn.now, durable=durable))
    turn.emit(GenerationSwitching(generation=group.generation, reason=reason, durable=durable))
    turn.do(*(RequestYield(index, group.generation, durable) for index in group.workers))
