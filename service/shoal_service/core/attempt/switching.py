"""Planned changes: a directive changes the target, and a running group stops at its next step boundary to follow it: to
pause, to shrink, to leave nodes, to grow, to change layout, to measure another shard level. Nothing here interrupts it.

`decide` is asked after every event. While nothing calls for a switch it only compares numbers. A layout is planned
when there are more usable workers than ranks, or when `parallelism` has changed, and once for each such change.

The planner cannot tell which shard level is the fastest, so that is measured in the group that trains:

    the group has trained for timeouts.level_trial_s    the median of its last steps is noted, and the group switches to
                                                        a rival of its layout, which differs in the shard level only
    MEDIAN_OF steps later                               the next rival; after the last one the fastest level
    the group is lost in between                        that rival is not tried again

A group grows if that gains more time than it costs until the next incident (`is_worth_growing`), whose re-formation
takes the new workers in as well.

A switch is from memory, so no step is lost or repeated. The step times hold for this attempt, and for each number of
workers separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from shoal_service.core.attempt import code_update, placement
from shoal_service.core.attempt.hangs import MEDIAN_OF
from shoal_service.core.attempt.messages import Directed, RequestYield
from shoal_service.core.attempt.placement import choose, is_settled, next_workers
from shoal_service.core.attempt.state import Attempt, AvoidedNode, PlanInputs, Running, Stage, Switching, Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events import GenerationSwitching, LayoutMeasured
from shoal_service.core.layout_plan import PlanLayout
from shoal_service.core.quantities import count_text
from shoal_workers.contract import EndReason, changes

_WORTH_STEPS = 20 * MEDIAN_OF
"""Least number of steps that must remain. With fewer, trying the other levels costs more than it could save."""


_EXPECTED_FROM = 3
"""Incidents of an attempt from which on the next one is expected at their rate."""


def obey(turn: Turn, directive: Directed) -> None:
    """Make the target what the directive says. What is equal to the target has no effect, so a directive may come
    twice. If the directive ends the attempt, the rest of it is left out."""
    if directive.is_preempted != turn.target.is_preempted:  # first: the same document takes the grant away
        turn.target = replace(turn.target, is_preempted=directive.is_preempted, moves_to=directive.moves_to)
        _end_without_group(turn)
    if turn.stage is not Stage.ENDED:
        _retarget(turn, directive)
        if directive.desired is not turn.target.desired:
            turn.target = replace(turn.target, desired=directive.desired)
            if directive.desired is Desired.CANCEL:
                turn.end(EndReason.CANCELLED, "cancelled on request")
            else:
                _end_without_group(turn)
    if turn.stage is not Stage.ENDED and directive.server_stops != turn.target.server_stops:
        turn.target = replace(turn.target, server_stops=directive.server_stops)
        _end_without_group(turn)


def _retarget(turn: Turn, directive: Directed) -> None:
    changed = {"elasticity": directive.elasticity, "parallelism": directive.parallelism}
    spec = turn.target.spec.model_copy(update=changed)
    turn.target = replace(turn.target, pinned=directive.pinned, granted=directive.granted, spec=spec)
    if directive.settings is not None:
        turn.target = turn.target.with_settings(directive.settings)
    if directive.code is not None and directive.code != (spec.code.archive or ""):
        code_update.request(turn, directive.code)


def _end_without_group(turn: Turn) -> None:
    """End an attempt that has to save and end while no group runs, because there is nothing to save. A running group is
    asked to stop at its next step boundary."""
    if turn.target.saves_and_ends and not turn.state.group_active and turn.stage is not Stage.COMMITTING:
        turn.end_after_save()


def avoid_nodes(turn: Turn, avoided: tuple[AvoidedNode, ...]) -> None:
    """Change the nodes that are avoided. A worker that is still starting is replaced when one of these nodes may be
    used again, because the nodes that it must not start on are fixed at its start and it may wait without end for room
    on others."""
    before, after = ({node.node_id for node in nodes} for nodes in (turn.target.avoided, avoided))
    turn.target = replace(turn.target, avoided=avoided)
    for worker in turn.pool.workers:
        if not worker.warm and not (before - after).isdisjoint(worker.avoids):
            turn.kill(worker.index, "a node may be used again")


@dataclass(frozen=True, slots=True)
class SwitchDecision(Decision):
    kept_layout_for: PlanInputs | None = None
    """Inputs for which a layout was planned and the group keeps its own; None if none was planned."""


def consider(turn: Turn) -> None:
    """Ask the group to stop at the next step boundary if something calls for it. Acts in RUNNING only."""
    running = turn.current
    if not isinstance(running, Running):
        return
    is_draining = bool(_workers_to_replace(turn.state, turn.now))
    if is_draining != (running.draining_since is not None):
        running = replace(running, draining_since=turn.now if is_draining else None)
        turn.set_stage(running)
    decision = decide(turn.state, running, turn.now, turn.plan)
    if decision.kept_layout_for is not None:
        turn.set_stage(replace(running, kept_layout_for=decision.kept_layout_for))
    reason = decision.reason if decision else _level_to_measure(turn, running)
    if reason:
        _switch(turn, reason)


def decide(state: Attempt, running: Running, now: float, plan: PlanLayout) -> SwitchDecision:
    num_workers = len(state.group.workers)
    if state.target.saves_and_ends:
        return SwitchDecision(True, _why_it_ends(state))
    if state.target.granted < num_workers:
        return SwitchDecision(True, f"shrink {num_workers} -> {state.target.granted}")
    if state.group.settings is not None and (changed := changes(state.group.settings, state.target.settings)):
        return SwitchDecision(True, ", ".join(changed))
    if state.code.trial is not None and state.code.trial.fault:
        return SwitchDecision(True, f"the new code is rolled back: {state.code.trial.fault}")
    if ready := code_update.readiness(state):
        return SwitchDecision(True, ready.reason)
    if drain := _drain_reason(state, running, now):
        return SwitchDecision(True, drain)
    return _layout_decision(state, running, now, plan)


def _drain_reason(state: Attempt, running: Running, now: float) -> str:
    """Return why to switch away from workers that have to leave: once others can take their place, or none are
    expected, and at the latest when their time has come. Empty until then; if fewer than elasticity.min_workers would
    be left, until their time has come."""
    leaving = _workers_to_replace(state, now)
    if not leaving:
        return ""
    reason, num_next = placement.describe_leave(state, leaving[0]), len(next_workers(state, now))
    leaves = [placement.find_leave(state, worker) for worker in leaving]
    if any(placement.is_due(state, worker, now) for worker in leaving):
        return reason
    if num_next < max(1, state.target.min_workers):
        return ""
    if num_next >= min(state.target.granted, len(state.group.workers)):
        return reason
    if any(leave is not None and not leave.is_replaceable for leave in leaves):
        return f"{reason}; no other node has room for a worker that takes its place"
    return reason if _no_worker_is_expected(state, running.draining_since or now, now) else ""


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
    if can_grow and not is_changed and not (worth := is_worth_growing(state, num_next, now)):
        return SwitchDecision(False, worth.reason)
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


def is_worth_growing(state: Attempt, num_workers: int, now: float) -> Decision:
    """Decide if growing to `num_workers` pays before the next incident.

    The re-formation of that incident takes in all workers that are warm by then, at no cost of its own. In a large job
    nodes fail and return all the time: returning workers wait for it, or until so many wait that growing pays.
    """
    before, history, closed = len(state.group.workers), state.history, state.health.last_closed
    after = closed.incident.after if closed is not None else None
    if closed is None or after is None or history.num_incidents < _EXPECTED_FROM or before < state.target.min_workers:
        return Decision(True, "no further incident is expected")
    # the first step that is known may be an epoch later: a script reports when it likes
    cost_s = (closed.incident.formed_at or closed.closed_at) - after.forming_at
    every_s = (now - history.incidents_since) / history.num_incidents
    gain_s = every_s * (1 - before / num_workers)
    return Decision(
        gain_s >= cost_s,
        f"growing from {before} to {count_text(num_workers, 'worker')} saves {gain_s:.3g} s before the next incident, "
        f"and a re-formation takes {cost_s:.3g} s (one incident in {every_s:.3g} s)",
    )


def _workers_to_replace(state: Attempt, now: float) -> list[Worker]:
    """List the workers of the group that have to leave and would not be in the next group."""
    leaving = placement.workers_to_leave(state)
    if not leaving:
        return []
    following = {worker.index for worker in next_workers(state, now)}
    return [worker for worker in leaving if worker.index not in following]


def _no_worker_is_expected(state: Attempt, since: float, now: float) -> bool:
    """True if no further worker is expected: none has become warm for a while, and those that are starting have had
    their time."""
    newest = max(since, *(worker.warm_at or 0.0 for worker in state.workers if worker.warm))
    is_starting = any(not worker.warm for worker in state.workers)
    timeouts = state.config.timeouts
    return now - newest >= (timeouts.gather_s if is_starting else timeouts.settle_s)


def _level_to_measure(turn: Turn, running: Running) -> str:
    """Return why the group stops to go on at another shard level; empty if it does not. Asked when there is no other
    reason to switch."""
    group, history = turn.group, turn.history
    if group.layout is None or turn.incident is not None:
        return ""
    if history.trying is not None and history.trying != group.layout:  # the group was lost, or has another size
        turn.history = history = history.with_measured(history.trying, None)
    if turn.code.update is not None:
        return ""
    is_trial, steps_left = history.trying is not None, (history.total_steps or 0) - turn.progress.step
    is_due = is_trial or (turn.now - running.since >= turn.config.timeouts.level_trial_s and steps_left >= _WORTH_STEPS)
    unknown = [layout for layout in group.levels if layout not in history.measured_s]
    is_measured = turn.progress.step - group.start_step > MEDIAN_OF
    if not is_due or not is_measured or not unknown or len(group.levels) < 2:
        return ""
    turn.history = history = history.with_measured(group.layout, median(turn.progress.step_times))
    if rivals := [layout for layout in unknown if layout != group.layout]:
        turn.history = replace(history, trying=rivals[0])
        return f"to measure shard {rivals[0].shard}, whose steps may be faster than those of shard {group.layout.shard}"
    measured_s, best = history.measured_s, history.fastest_layout(group.levels)
    step_s = {str(layout.shard): seconds for layout in group.levels if (seconds := measured_s[layout]) is not None}
    turn.emit(LayoutMeasured(shard=best.shard, step_s=step_s))
    return f"shard {best.shard} is as fast as shard {group.layout.shard} or faster" if best != group.layout else ""


def _switch(turn: Turn, reason: str) -> None:
    """Ask for a stop at the next step boundary. The snapshot of that step in memory is enough, unless no worker will be
    left to read it from: in a pause, or when the attempt will have to wait for capacity."""
    target, group = turn.target, turn.group
    num_next = len(next_workers(turn.state, turn.now))
    durable = target.saves_and_ends or not target.keeps_snapshots or num_next < max(1, target.min_workers)
    turn.enter(Switching(since=turn.now, durable=durable))
    turn.emit(GenerationSwitching(generation=group.generation, reason=reason, durable=durable))
    turn.do(*(RequestYield(index, group.generation, durable) for index in group.workers))
