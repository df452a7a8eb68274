"""Incidents: who is to blame for a lost group, and when that is over. Called by `leaving`, `judging` and `news`."""

from __future__ import annotations

from shoal_service.core.attempt.state.attempt import Attempt, Worker
from shoal_service.core.attempt.state.incident import Incident
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind

_DEATHS = (IncidentCause.WORKER_DIED, IncidentCause.NODE_DIED)


def blame(turn: Turn, cause: IncidentCause, witness: str, message: str, worker: Worker | None) -> None:
    """Open the incident, or add to the one that is open.

    `worker`: the one that is gone; None where the group broke and nobody is known to be gone.
    """
    state = turn.state
    rank = None if worker is None else state.rank_of(worker.index)
    ranks = () if rank is None else (rank,)
    names = () if worker is None else (worker.worker_id,)
    node_id = worker.info.node_id if worker is not None and worker.info is not None else ""
    known = state.incident
    if known is None:
        incident = Incident(
            id=state.num_incidents + 1,
            cause=cause,
            witness=witness,
            ranks=ranks,
            worker_ids=names,
            node_id=node_id,
            generation=state.generation,
            at=turn.now,
            last_sign_at=_last_sign(state, worker, turn.now),
            from_workers=len(state.members),
            from_layout=state.layout.describe() if state.layout else "",
            message=message,
            step_before=state.step,
        )
        turn.set(incident=incident, num_incidents=incident.id)
        turn.emit(
            "incident.opened", id=incident.id, cause=cause, witness=witness, ranks=list(ranks), message=message,
            generation=state.generation, workers=len(state.members), step=state.step,
        )  # fmt: skip
    else:
        signs = [s for s in (known.last_sign_at, _last_sign(state, worker, known.at)) if s is not None]
        verdict = {"cause": cause, "witness": witness, "message": message, "node_id": node_id}
        culprit = {"message": message, "node_id": node_id}
        if not (known.is_suspicion and worker is not None):
            verdict = culprit if cause is known.cause and worker is not None and not known.ranks else {}
        turn.set(
            incident=known.model_copy(
                update={
                    "ranks": tuple(sorted({*known.ranks, *ranks})),
                    "worker_ids": tuple(dict.fromkeys((*known.worker_ids, *names))),
                    "last_sign_at": max(signs) if signs and known.forming_at is None else known.last_sign_at,
                    "formed_at": None,  # a late report of a step must not close it
                    **verdict,
                }
            )
        )
    turn.show_incident()


def date_death(turn: Turn, worker_id: str, died_at: float) -> None:
    """The worker's own death is a later sign than its last beat, if the open incident is about nothing else."""
    incident = turn.state.incident
    if incident is None or incident.cause not in _DEATHS or worker_id not in incident.worker_ids:
        return
    if max(0.0, incident.last_sign_at or 0.0) < died_at <= incident.at:
        turn.set(incident=incident.model_copy(update={"last_sign_at": died_at}))
        turn.show_incident()


def close(turn: Turn) -> None:
    """The first step after it is done."""
    incident = turn.state.incident
    assert incident is not None
    turn.show_incident(closed=True)
    turn.emit(
        "incident.closed",
        id=incident.id,
        cause=incident.cause,
        action=incident.action,
        detect_s=incident.detect_s,
        recovery_s=incident.recovery_s(turn.now),
        steps_lost=incident.steps_lost,
        from_workers=incident.from_workers,
        to_workers=incident.to_workers,
        state_source=incident.state_source,
        bytes_moved=incident.bytes_moved,
    )
    turn.set(incident=None)


def _last_sign(state: Attempt, worker: Worker | None, at: float) -> float | None:
    """The newest of: a beat of the lost member (of any, if nobody is known to be lost), a broken collective. Clocks of
    nodes differ: what is later than the incident says nothing."""
    lost = state.beats.get(worker.index) if worker is not None else None
    beats = [lost] if lost is not None else [] if worker is not None else list(state.beats.values())
    exits = [e.at for e in state.exits.values() if e.kind is ExitKind.COLLECTIVE_FAILED]
    return max((sign for sign in [*(beat.at for beat in beats), *exits] if 0 < sign <= at), default=None)
