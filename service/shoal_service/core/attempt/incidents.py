"""2 INCIDENT: the record of what went wrong and what was done: opened, added to, dated, explained, closed. And the
bounds on the steps that a loss costs, which it notes.

Every stage adds its part. It decides nothing about the group; what a cause means is in the table of faults.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from shoal_service.core.attempt.faults import FAULTS, Blame, Memory
from shoal_service.core.attempt.messages import ShowIncident
from shoal_service.core.attempt.placement import lonely_ranks
from shoal_service.core.attempt.state import Attempt, ClosedIncident, GroupBefore, Incident, Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.endings import LostAttempt
from shoal_service.core.events import IncidentClosed, IncidentOpened, WorkerExited
from shoal_service.core.node_loss import NodeLossBound, Protection, WorkerLossBound
from shoal_workers.contract import ExitKind, IncidentCause, SnapshotCost

_KEPT_EXITS = 64


def blame(turn: Turn, cause: IncidentCause, witness: str, message: str, worker: Worker | None) -> None:
    """Open the incident, or add to the open incident.

    `worker`: the lost worker; None if the group broke and no worker is known to be lost.
    """
    distrust_memory(turn, cause)
    state = turn.state
    rank = None if worker is None else state.group.rank_of(worker.index)
    ranks = () if rank is None else (rank,)
    names = () if worker is None else (worker.worker_id,)
    node_id = "" if worker is None else worker.node_id
    known = state.incident
    bound = bound_node_loss(state) if FAULTS[cause].blames is Blame.NODE else None
    sign_at = _last_sign(state, worker, turn.now if known is None else known.at)
    if known is None:
        before = GroupBefore(
            generation=state.group.generation,
            num_workers=len(state.group.workers),
            layout=state.target.describe_layout(state.group.layout),
            step=state.progress.step,
        )
        turn.incident = Incident(
            id=state.history.num_incidents + 1,
            cause=cause,
            witness=witness,
            ranks=ranks,
            worker_ids=names,
            node_id=node_id,
            before=before,
            at=turn.now,
            last_sign_at=sign_at,
            message=message,
            node_loss=bound,
        )
        since = turn.history.incidents_since or turn.now
        turn.history = replace(turn.history, num_incidents=turn.incident.id, incidents_since=since)
        turn.emit(make_opened_event(turn.incident))
    else:
        signs = [sign for sign in (known.last_sign_at, sign_at) if sign is not None]
        updated = known
        if worker is not None and known.is_suspicion:
            updated = replace(known, cause=cause, witness=witness, message=message, node_id=node_id)
        elif worker is not None and cause is known.cause and not known.ranks:
            updated = replace(known, message=message, node_id=node_id)
        turn.incident = replace(
            updated,
            ranks=tuple(sorted({*known.ranks, *ranks})),
            worker_ids=tuple(dict.fromkeys((*known.worker_ids, *names))),
            last_sign_at=max(signs) if signs and known.after is None else known.last_sign_at,
            formed_at=None,  # a late report of a step must not close it
            node_loss=known.node_loss or bound,
        )
    turn.show_incident()


def make_opened_event(incident: Incident) -> IncidentOpened:
    return IncidentOpened(
        id=incident.id,
        cause=incident.cause,
        witness=incident.witness,
        ranks=incident.ranks,
        message=incident.message,
        generation=incident.before.generation,
        workers=incident.before.num_workers,
        step=incident.before.step,
        node_loss=incident.node_loss,
    )


def note_quiesced(incident: Incident, step: int, now: float) -> Incident:
    """The incident once every worker has left `run`. `step`: the newest step that the survivors have completed."""
    before = replace(incident.before, step=max(incident.before.step, step))
    bound = incident.node_loss
    if bound is not None:
        bound = _with_more_steps(bound, before.step - incident.before.step)
    return replace(incident, quiesced_at=now, before=before, node_loss=bound)


def distrust_memory(turn: Turn, cause: IncidentCause) -> None:
    """Trust no snapshot up to this generation any more, if the cause says that they may hold wrong numbers."""
    if FAULTS[cause].memory is Memory.DISTRUSTED:
        turn.snapshots = replace(turn.snapshots, oldest_generation=turn.group.generation + 1)


def date_death(turn: Turn, worker_id: str, died_at: float) -> None:
    """Note when a worker died. Detection is counted from then, if the open incident is this death and no sign is
    newer."""
    incident = turn.incident
    if incident is None or not _is_death_of(incident, worker_id):
        return
    if max(0.0, incident.last_sign_at or 0.0) < died_at <= incident.at:
        turn.incident = replace(incident, last_sign_at=died_at)
        turn.show_incident()


def explain_death(turn: Turn, worker_id: str, message: str) -> None:
    """Note how a worker's process ended. The incident of this death, which may be closed already, gets the words of the
    operating system."""
    if worker_id in turn.health.explained:
        return
    turn.health = replace(turn.health, explained=(*turn.health.explained, worker_id)[-_KEPT_EXITS:])
    turn.emit(WorkerExited(worker_id=worker_id, message=message))
    incident, closed = turn.incident, turn.health.last_closed
    if incident is not None and _is_death_of(incident, worker_id):
        turn.incident = replace(incident, message=message)
        turn.show_incident()
    elif incident is None and closed is not None and _is_death_of(closed.incident, worker_id):
        turn.do(ShowIncident(replace(closed.incident, message=message), closed.closed_at))


def _is_death_of(incident: Incident, worker_id: str) -> bool:
    return FAULTS[incident.cause].is_death and worker_id in incident.worker_ids


def count_lost_steps(turn: Turn, start_step: int) -> int:
    """Count the steps that are done again because the group begins at `start_step`, and return their number. Those of
    an incident are counted once, also if several groups begin before it closes."""
    incident = turn.incident
    if incident is None:
        lost = counted = max(0, turn.progress.step - start_step)  # a switch whose save failed
    else:
        lost = max(0, incident.before.step - start_step)
        counted = lost - (incident.steps_lost or 0)
        turn.incident = replace(incident, steps_lost=lost)
    turn.history = replace(turn.history, steps_lost=turn.history.steps_lost + counted)
    return lost


def close_at_the_end(turn: Turn) -> None:
    """Close the incident of a group that only saved or validated again: no step follows the last one that could close
    it."""
    if turn.incident is not None and turn.incident.formed_at is not None and turn.state.is_finishing:
        close(turn)


def close(turn: Turn) -> None:
    """Close the incident: the next group has completed its first step."""
    incident = turn.incident
    assert incident is not None
    turn.show_incident(closed=True)
    after = incident.after
    turn.emit(
        IncidentClosed(
            id=incident.id,
            cause=incident.cause,
            action=incident.action,
            detect_s=incident.detect_s,
            recovery_s=incident.recovery_s(turn.now),
            steps_lost=incident.steps_lost,
            from_workers=incident.before.num_workers,
            to_workers=after.num_workers if after else None,
            state_source=after.state_source if after else None,
            bytes_moved=after.bytes_moved if after else None,
        )
    )
    closed = ClosedIncident(incident=incident, closed_at=turn.now)
    turn.health = replace(turn.health, last_closed=closed)
    if incident.cause is IncidentCause.NODE_UNREACHABLE:  # while the node is silent, the cause may still change
        turn.health = replace(turn.health, silences={**turn.health.silences, incident.node_id: closed})
    turn.incident = None


def _last_sign(state: Attempt, worker: Worker | None, at: float) -> float | None:
    """Find the time of the newest sign of the fault: the progress stamp of the lost worker (of every worker, if none is
    known to be lost), or a failed collective. Clocks of nodes differ, so a time after that of the incident is
    ignored."""
    if worker is None:
        stamps = list(state.progress.stamps.values())
    else:
        stamps = [state.progress.stamps[worker.index]] if worker.index in state.progress.stamps else []
    exits = [e.at for e in state.group.exits.values() if e.kind is ExitKind.COLLECTIVE_FAILED]
    return max((sign for sign in [*(stamp.at for stamp in stamps), *exits] if 0 < sign <= at), default=None)


def open_after_loss(lost: LostAttempt, now: float) -> Incident:
    """Return the open incident of a new attempt whose predecessor was lost with its cluster, or has failed. `now`: the
    start of the new attempt, which has no survivor to wait for."""
    return Incident(
        id=1,
        cause=lost.cause,
        witness="control plane",
        message=lost.message,
        before=GroupBefore(generation=lost.generation, num_workers=lost.workers, layout=lost.layout, step=lost.step),
        at=lost.at,
        last_sign_at=lost.last_report_at,
        quiesced_at=now,
    )


def bound_node_loss(state: Attempt) -> NodeLossBound | None:
    """Bound the steps that the loss of a node costs now; None if no group has formed yet, or a script has its own
    checkpoints."""
    if state.target.is_script or not state.group.machines or not state.history.has_formed:
        return None
    if not state.target.keeps_snapshots:
        return _from_checkpoint(state, "snapshot.enabled is false")
    if state.progress.stopped:
        first = min(state.progress.stopped.values(), key=lambda item: item.rank)
        return _from_checkpoint(state, f"rank {first.rank} has no memory for snapshots")
    cost = state.progress.snapshots
    if cost is None or cost.generation != state.group.generation:
        return _from_checkpoint(state, "the group has not reported a snapshot yet")
    nodes, machines = set(state.group.nodes), state.group.machines
    if state.group.layout is not None and not lonely_ranks(state.group.layout, machines):
        return _from_snapshots(Protection.REPLICAS, cost)
    if len(set(machines)) == 1:
        if len(nodes) > 1:
            return _from_snapshots(Protection.SHARED_MEMORY, cost)
        return _from_checkpoint(state, "all workers are on one node")
    if cost.buddy_step is None:
        return _from_checkpoint(state, "there is no copy of every rank on other nodes yet")
    return _from_copies(state, cost, cost.buddy_step)


def bound_worker_loss(state: Attempt) -> WorkerLossBound | None:
    """Bound the steps that the loss of a worker costs now; None if no group has formed yet, it has not reported how it
    keeps snapshots, or a script has its own checkpoints."""
    if state.target.is_script or not state.group.machines or not state.history.has_formed:
        return None
    lacking = sorted(rank for rank, item in state.progress.stopped.items() if not item.only_copies)
    if lacking or not state.target.keeps_snapshots:
        lacks = f"rank {lacking[0]} has no memory for snapshots" if lacking else ""
        bound = _from_checkpoint(state, lacks if state.target.keeps_snapshots else "snapshot.enabled is false")
        return WorkerLossBound(at_most=bound.at_most, reason=bound.reason)
    cost = state.progress.snapshots
    if cost is None or cost.generation != state.group.generation:
        return None
    steps = ceil(cost.every_steps)
    return WorkerLossBound(at_most=steps, reason=cost.copies_reason if steps > 1 else "")


def _with_more_steps(bound: NodeLossBound, steps: int) -> NodeLossBound:
    """The bound, once it is known that the survivors have completed `steps` steps more than when it was noted."""
    if steps <= 0 or bound.protection not in (Protection.COPIES, Protection.CHECKPOINT):
        return bound
    now = bound.now + steps
    return bound.model_copy(update={"now": now, "at_most": None if bound.at_most is None else max(now, bound.at_most)})


def _from_copies(state: Attempt, cost: SnapshotCost, buddy_step: int) -> NodeLossBound:
    """Bound if copies on other nodes protect the state. The next copies are made at the first snapshot at which they
    are due, but not before the last ones have arrived:

        copies of step 32 ......... arrived at 48: copies of 48 ......... arrived at 64
                                                                        ^ up to here the group goes back to 32

    A newer checkpoint is used instead."""
    now = max(0, state.progress.step - max(buddy_step, state.checkpoints.durable_step))
    flight = cost.buddy_flight_steps
    between = max(ceil(cost.buddy_every_steps) + ceil(cost.every_steps) - 1, flight)
    return NodeLossBound(
        protection=Protection.COPIES,
        at_most=max(now, between + flight),
        now=now,
        every_steps=cost.buddy_every_steps,
    )


def _from_snapshots(protection: Protection, cost: SnapshotCost) -> NodeLossBound:
    """Bound if snapshots outlive the node. In the worst case the node dies in the middle of an update, and the newest
    snapshot is the one before."""
    steps = ceil(cost.every_steps)
    return NodeLossBound(protection=protection, at_most=steps, now=steps - 1)


def _from_checkpoint(state: Attempt, reason: str) -> NodeLossBound:
    now = max(0, state.progress.step - state.checkpoints.durable_step)
    every = state.target.spec.checkpoint.every_steps
    return NodeLossBound(
        protection=Protection.CHECKPOINT, at_most=None if every is None else max(now, every), now=now, reason=reason
    )


def note_dead_silent_node(turn: Turn, worker: Worker, cause: IncidentCause, message: str) -> None:
    """A worker is gone. If it was left out and Ray has declared its node dead, the cause of the incident becomes the
    dead node."""
    if worker.left_out is None or cause is not IncidentCause.NODE_DIED:
        return
    node_id, incident = worker.node_id, turn.incident
    silence = turn.health.silences.get(node_id)
    if incident is not None and incident.cause is IncidentCause.NODE_UNREACHABLE and incident.node_id == node_id:
        turn.incident = replace(incident, cause=cause, message=message)
        turn.show_incident()
        if incident.quiesced_at is None:
            return  # charged when the group re-forms
    elif silence is not None:
        turn.do(ShowIncident(replace(silence.incident, cause=cause, message=message), silence.closed_at))
        forget_silence(turn, node_id)
    else:
        return  # another worker of the node was lost before
    turn.budgets = turn.budgets.recovered(turn.now)


def forget_silence(turn: Turn, node_id: str) -> None:
    silences = {known: silence for known, silence in turn.health.silences.items() if known != node_id}
    turn.health = replace(turn.health, silences=silences)
