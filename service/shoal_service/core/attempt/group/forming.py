"""When a group forms, and from which state: the first one, the next one, and a larger or smaller one on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.attempt import nodes
from shoal_service.core.attempt.commands import RequestYield, Run
from shoal_service.core.attempt.faults import hangs
from shoal_service.core.attempt.group import holdings, recall
from shoal_service.core.attempt.group.buddies import buddies
from shoal_service.core.attempt.group.ranks import next_members
from shoal_service.core.attempt.group.source import best_source, durable_step
from shoal_service.core.attempt.state.attempt import Desired, Stage, Worker
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import Assignment


def consider(turn: Turn) -> None:
    """Looked at after every event: is it time to form a first group, to resume, to grow, to shrink, to pause?"""
    match turn.state.stage:
        case Stage.STARTING | Stage.WAITING if _ready(turn):
            form(turn, next_members(turn.state, turn.now))
        case Stage.RUNNING:
            reason = _reason_to_switch(turn)
            if reason is not None:
                _switch(turn, reason)
        case _:
            pass


def plan_next(turn: Turn) -> None:
    """A group has ended and may be followed by another: form it now, or wait for workers."""
    state = turn.state
    if recall.is_worthwhile(state):
        recall.begin(turn)
        return
    members = next_members(state, turn.now)
    can_form = len(members) >= max(1, state.min_workers) and turn.now >= state.not_before
    if state.desired is Desired.PAUSE:
        best = best_source(state)
        if best is None or best.step <= durable_step(state) or not can_form:
            turn.end(EndReason.PAUSED, "paused on request")
            return
        # what is in memory is newer than what is durable: go on from it, and pause at the next step boundary
    if can_form:
        form(turn, members)
        return
    turn.enter(Stage.WAITING)
    turn.emit(
        "job.waiting",
        warm=len(members),
        min_workers=state.min_workers,
        until=turn.now + state.spec.elasticity.wait_s,
    )


def form(turn: Turn, chosen: Sequence[Worker]) -> None:
    """Send `run` of the next generation to every member; those of `chosen` that the layout does not need stay warm."""
    recall.end(turn)
    state = turn.state
    generation = state.generation + 1
    planned = turn.plan(state.spec, len(chosen), state.profile)
    layout = planned.layout
    chosen = chosen[: layout.world_size]
    infos = [worker.info for worker in chosen if worker.info is not None]
    memory = best_source(state, chosen) if state.keeps_snapshots else None
    keepers = buddies(infos) if state.keeps_snapshots else (None,) * len(infos)
    restore_from = None if state.newest is None else f"{state.checkpoint_root.rstrip('/')}/{state.newest}"
    for rank, (worker, buddy) in enumerate(zip(chosen, keepers, strict=True)):
        turn.update_worker(worker.index, in_run=True)
        assignment = Assignment(
            job_id=state.job_id,
            attempt=state.attempt,
            generation=generation,
            rank=rank,
            layout=layout,
            store_host=infos[0].node_ip,
            store_port=infos[0].store_port,
            restore_from=restore_from,
            restore_snapshot=memory,
            buddy=buddy,
            is_recovery=state.incident is not None,
            skip_steps=state.skip_steps,
            collective_timeout_s=hangs.collective_timeout_s(state),
        )
        turn.do(Run(worker.index, assignment))
    source = "memory" if memory else "checkpoint" if state.newest else "initial"
    if state.incident is not None:
        spares = [p.index for p in chosen if p.index not in state.members]
        turn.set(
            incident=state.incident.model_copy(
                update={
                    "forming_at": turn.now,
                    "to_workers": len(chosen),
                    "to_layout": layout.describe(),
                    "num_spares": len(spares),
                    "state_source": source,
                }
            )
        )
        turn.show_incident()
    turn.set(
        generation=generation,
        members=tuple(p.index for p in chosen),
        layout=layout,
        planned_by=state.spec.parallelism,
        restored=state.newest,
        memory=memory,
        exits={},
        asked={},
        told={},
        beats={},
        slow={},
        parts={name: parts for name, parts in state.parts.items() if name in state.committing},
    )
    turn.enter(Stage.FORMING)
    turn.emit(
        "generation.forming",
        generation=generation,
        workers=len(chosen),
        layout=layout.describe(),
        reason=planned.reason,
        source=source,
        restore=state.newest,
        step=memory.step if memory else durable_step(state),
    )


def _ready(turn: Turn) -> bool:
    """All that were asked for are there; or enough are, and the others let us wait too long."""
    state = turn.state
    members = next_members(state, turn.now)
    if len(members) < max(1, state.min_workers) or turn.now < state.not_before:
        return False
    if recall.is_pending(state, turn.now) or holdings.awaited(state, turn.now):
        return False
    return len(members) >= state.granted or _settled(turn)


def _settled(turn: Turn) -> bool:
    """No worker is missing, or none has become warm for a while: the first group waits longer than others."""
    state = turn.state
    if len(state.workers) >= state.granted and all(p.warm for p in state.workers):
        return True
    newest = max((p.warm_at or 0.0 for p in state.warm), default=turn.now)
    patience_s = state.timeouts.gather_s if state.stage is Stage.STARTING else state.timeouts.settle_s
    return turn.now - newest >= patience_s


def _reason_to_switch(turn: Turn) -> str | None:
    state = turn.state
    have, could = len(state.members), len(next_members(state, turn.now))
    layout = turn.plan(state.spec, max(1, could), state.profile).layout
    if state.desired is Desired.PAUSE:
        return "pause"
    if state.granted < have:
        return f"shrink {have} -> {state.granted}"
    drain = _reason_to_drain(turn)
    if drain is not None:
        return drain
    if state.layout is None or layout == state.layout or turn.now < state.grow_not_before:
        return None
    if could > have and layout.world_size > have and _settled(turn):
        return f"grow {have} -> {layout.world_size}"
    if state.spec.parallelism != state.planned_by:
        return f"relayout {state.layout.describe()} -> {layout.describe()}"
    return None


def _reason_to_drain(turn: Turn) -> str | None:
    """Members have to go: once others can take their place, or nobody is to be expected any more; at the latest when
    their time has come. Below elasticity.min_workers only then."""
    state = turn.state
    following = next_members(state, turn.now)
    going = [p for p in nodes.members_to_go(state) if p not in following]
    if not going:
        turn.set(draining_since=None)
        return None
    if state.draining_since is None:
        turn.set(draining_since=turn.now)
    reason = nodes.why(state, going[0])
    if any(nodes.is_due(state, p, turn.now) for p in going):
        return reason
    if len(following) < max(1, state.min_workers):
        return None
    if len(following) >= min(state.granted, len(state.members)) or _nobody_comes(turn):
        return reason
    return None


def _nobody_comes(turn: Turn) -> bool:
    """No worker has become warm for a while, and those that are starting had their time."""
    state = turn.state
    newest = max(turn.state.draining_since or turn.now, *(p.warm_at or 0.0 for p in state.warm))
    is_starting = any(not p.warm for p in state.workers)
    return turn.now - newest >= (state.timeouts.gather_s if is_starting else state.timeouts.settle_s)


def _switch(turn: Turn, reason: str) -> None:
    """Ask for a stop at the next step boundary. Its snapshot in memory is enough, unless nobody will be left to read it
    from there: in a pause, or when the attempt will have to wait for capacity."""
    state = turn.state
    following = len(next_members(state, turn.now))
    durable = state.desired is Desired.PAUSE or not state.keeps_snapshots or following < max(1, state.min_workers)
    turn.enter(Stage.SWITCHING)
    turn.set(switch_durable=durable)
    turn.emit("generation.switching", generation=state.generation, reason=reason, durable=durable)
    turn.do(*(RequestYield(index, state.generation, durable) for index in state.members))
