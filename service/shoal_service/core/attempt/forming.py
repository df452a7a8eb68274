"""Which processes form the next group, when, and from which state."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.attempt.commands import RequestYield, Run
from shoal_service.core.attempt.state import Process, Stage, Wanted
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.planner import plan
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import Assignment


def consider(turn: Turn) -> None:
    """Looked at after every event: is it time to form a first group, to resume, to grow, to shrink, to pause?"""
    match turn.state.stage:
        case Stage.STARTING | Stage.WAITING if _ready(turn):
            form(turn, _candidates(turn))
        case Stage.RUNNING if turn.state.exits:
            # a member has left as planned: the others are about to, or run into the deadline
            turn.enter(Stage.SWITCHING)
        case Stage.RUNNING:
            reason = _reason_to_switch(turn)
            if reason is not None:
                _switch(turn, reason)
        case _:
            pass


def plan_next(turn: Turn) -> None:
    """A group has ended and may be followed by another: form it now, or wait for processes."""
    if turn.state.wanted is Wanted.PAUSE:
        turn.end(EndReason.PAUSED, "paused on request")
        return
    candidates = _candidates(turn)
    if len(candidates) < turn.state.min_workers or turn.now < turn.state.not_before:
        turn.enter(Stage.WAITING)
        turn.emit(
            "job.waiting",
            warm=len(candidates),
            min_workers=turn.state.min_workers,
            until=turn.now + turn.state.spec.elasticity.wait_s,
        )
        return
    form(turn, candidates)


def form(turn: Turn, chosen: Sequence[Process]) -> None:
    """Send `run` of the next generation to every member."""
    state = turn.state
    generation = state.generation + 1
    layout, reason = plan(state.spec, len(chosen))
    first = chosen[0].info
    assert first is not None
    restore_from = None if state.newest is None else f"{state.checkpoint_root.rstrip('/')}/{state.newest}"
    for rank, process in enumerate(chosen):
        turn.update_process(process.index, in_run=True)
        assignment = Assignment(
            job_id=state.job_id,
            attempt=state.attempt,
            generation=generation,
            rank=rank,
            layout=layout,
            store_host=first.node_ip,
            store_port=first.store_port,
            restore_from=restore_from,
        )
        turn.do(Run(process.index, assignment))
    turn.set(
        generation=generation,
        members=tuple(p.index for p in chosen),
        restored=state.newest,
        exits={},
        parts={name: parts for name, parts in state.parts.items() if name in state.committing},
    )
    if state.incident is not None:
        source = "initial" if state.newest is None else "checkpoint"
        turn.set(
            incident=state.incident.model_copy(
                update={"forming_at": turn.now, "to_workers": len(chosen), "state_source": source}
            )
        )
        turn.show_incident()
    turn.enter(Stage.FORMING)
    turn.emit(
        "generation.forming",
        generation=generation,
        workers=len(chosen),
        layout=layout.describe(),
        reason=reason,
        restore=state.newest,
    )


def _candidates(turn: Turn) -> tuple[Process, ...]:
    """Warm processes up to the grant: members keep their rank order, so that state stays where it is; spares follow."""
    order = {index: rank for rank, index in enumerate(turn.state.members)}
    warm = sorted(turn.state.warm, key=lambda p: (order.get(p.index, len(order)), p.index))
    return tuple(warm[: turn.state.granted])


def _ready(turn: Turn) -> bool:
    """All that were asked for are there; or enough are, and the others let us wait too long."""
    state = turn.state
    candidates = _candidates(turn)
    if len(candidates) < max(1, state.min_workers) or turn.now < state.not_before:
        return False
    return len(candidates) >= state.granted or _settled(turn)


def _settled(turn: Turn) -> bool:
    """No process is missing, or none has become warm for a while: the first group waits longer than others."""
    state = turn.state
    if len(state.processes) >= state.granted and all(p.warm for p in state.processes):
        return True
    newest = max((p.warm_at or 0.0 for p in state.warm), default=turn.now)
    patience_s = state.timeouts.gather_s if state.stage is Stage.STARTING else state.timeouts.settle_s
    return turn.now - newest >= patience_s


def _reason_to_switch(turn: Turn) -> str | None:
    state = turn.state
    have, could = len(state.members), state.num_usable
    if state.wanted is Wanted.PAUSE:
        return "pause"
    if state.granted < have:
        return f"shrink {have} -> {state.granted}"
    if could > have and turn.now >= state.grow_not_before and _settled(turn):
        return f"grow {have} -> {could}"
    return None


def _switch(turn: Turn, reason: str) -> None:
    state = turn.state
    turn.enter(Stage.SWITCHING)
    turn.emit("generation.switching", generation=state.generation, reason=reason)
    turn.do(*(RequestYield(index, state.generation) for index in state.members))
