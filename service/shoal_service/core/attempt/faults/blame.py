"""Opens, changes and closes the incident. `group/exits`, `group/follow_up`, `reports` and `machine` call this.

It decides nothing about the group; what a cause means is in the table of faults.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import ShowIncident
from shoal_service.core.attempt.faults import silences
from shoal_service.core.attempt.faults.table import FAULTS, Blame, Memory
from shoal_service.core.attempt.group.node_loss import node_loss_bound
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.health import ClosedIncident
from shoal_service.core.attempt.state.incident import GroupBefore, Incident
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.incidents import IncidentClosed, IncidentOpened
from shoal_service.core.events.workers import WorkerExited
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind

_KEPT_EXITS = 64


def blame(turn: Turn, cause: IncidentCause, witness: str, message: str, worker: Worker | None) -> None:
    """Open the incident, or add to the one that is open.

    `worker`: the lost one; None if the group broke and no worker is known to be lost.
    """
    distrust_memory(turn, cause)
    state = turn.state
    rank = None if worker is None else state.group.rank_of(worker.index)
    ranks = () if rank is None else (rank,)
    names = () if worker is None else (worker.worker_id,)
    node_id = worker.info.node_id if worker is not None and worker.info is not None else ""
    known = state.incident
    bound = node_loss_bound(state) if FAULTS[cause].blames is Blame.NODE else None
    if known is None:
        incident = Incident(
            id=state.history.num_incidents + 1,
            cause=cause,
            witness=witness,
            ranks=ranks,
            worker_ids=names,
            node_id=node_id,
            before=GroupBefore(
                generation=state.group.generation,
                num_workers=len(state.group.workers),
                layout=state.group.layout.describe() if state.group.layout else "",
                step=state.progress.step,
            ),
            at=turn.now,
            last_sign_at=_last_sign(state, worker, turn.now),
            message=message,
            node_loss=bound,
        )
        turn.incident = incident
        turn.history = replace(turn.history, num_incidents=incident.id)
        turn.emit(opened(incident))
    else:
        signs = [s for s in (known.last_sign_at, _last_sign(state, worker, known.at)) if s is not None]
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


def opened(incident: Incident) -> IncidentOpened:
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


def distrust_memory(turn: Turn, cause: IncidentCause) -> None:
    """If the cause says so, no snapshot up to this generation is read any more."""
    if FAULTS[cause].memory is Memory.DISTRUSTED:
        turn.snapshots = replace(turn.snapshots, oldest_generation=turn.group.generation + 1)


def date_death(turn: Turn, worker_id: str, died_at: float) -> None:
    """Detection is counted from the time of death, if the open incident is this death and no sign is newer."""
    incident = turn.incident
    if incident is None or not FAULTS[incident.cause].is_death or worker_id not in incident.worker_ids:
        return
    if max(0.0, incident.last_sign_at or 0.0) < died_at <= incident.at:
        turn.incident = replace(incident, last_sign_at=died_at)
        turn.show_incident()


def explain_death(turn: Turn, worker_id: str, message: str) -> None:
    """The incident of this death, which may be closed already, has the words of the operating system."""
    if worker_id in turn.health.explained:
        return
    turn.health = replace(turn.health, explained=(*turn.health.explained, worker_id)[-_KEPT_EXITS:])
    turn.emit(WorkerExited(worker_id=worker_id, message=message))
    incident, closed = turn.incident, turn.health.last_closed
    if incident is not None:
        if FAULTS[incident.cause].is_death and worker_id in incident.worker_ids:
            turn.incident = replace(incident, message=message)
            turn.show_incident()
    elif closed is not None and FAULTS[closed.incident.cause].is_death and worker_id in closed.incident.worker_ids:
        turn.do(ShowIncident(replace(closed.incident, message=message), closed.closed_at))


def close(turn: Turn) -> None:
    """The next group has completed its first step."""
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
    turn.health = replace(turn.health, last_closed=ClosedIncident(incident=incident, closed_at=turn.now))
    silences.remember(turn, incident)
    turn.incident = None


def _last_sign(state: Attempt, worker: Worker | None, at: float) -> float | None:
    """The newest of: the progress stamp of the lost worker (of every worker, if none is known to be lost), and the
    failed collectives. Clocks of nodes differ, so a time after that of the incident is ignored."""
    if worker is None:
        stamps = list(state.progress.stamps.values())
    else:
        stamps = [state.progress.stamps[worker.index]] if worker.index in state.progress.stamps else []
    exits = [e.at for e in state.group.exits.values() if e.kind is ExitKind.COLLECTIVE_FAILED]
    return max((sign for sign in [*(stamp.at for stamp in stamps), *exits] if 0 < sign <= at), default=None)
