"""What becomes of the incident of a silent node once Ray has declared the node dead: its cause changes.

Called by `group/exits` when a worker is lost, by `blame` when an incident closes and by `group/silent_nodes`. It
decides nothing about the group.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import ShowIncident
from shoal_service.core.attempt.state.health import ClosedIncident
from shoal_service.core.attempt.state.incident import Incident
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.job import IncidentCause


def remember(turn: Turn, incident: Incident) -> None:
    """The incident closes. While its node is silent, its cause may still change."""
    if incident.cause is IncidentCause.NODE_UNREACHABLE:
        silence = ClosedIncident(incident=incident, closed_at=turn.now)
        turn.health = replace(turn.health, silences={**turn.health.silences, incident.node_id: silence})


def lost(turn: Turn, worker: Worker, cause: IncidentCause, message: str) -> None:
    """A worker is gone. If it was left out and Ray has declared its node dead, the incident is a dead node's."""
    if worker.left_out is None or worker.info is None or cause is not IncidentCause.NODE_DIED:
        return
    node_id, incident = worker.info.node_id, turn.incident
    silence = turn.health.silences.get(node_id)
    if incident is not None and incident.cause is IncidentCause.NODE_UNREACHABLE and incident.node_id == node_id:
        turn.incident = replace(incident, cause=cause, message=message)
        turn.show_incident()
        if incident.quiesced_at is None:
            return  # charged when the group re-forms
    elif silence is not None:
        turn.do(ShowIncident(replace(silence.incident, cause=cause, message=message), silence.closed_at))
        forget(turn, node_id)
    else:
        return  # another worker of the node was lost before
    turn.budgets = replace(turn.budgets, recoveries=turn.budgets.recoveries + 1)


def forget(turn: Turn, node_id: str) -> None:
    silences = {known: silence for known, silence in turn.health.silences.items() if known != node_id}
    turn.health = replace(turn.health, silences=silences)
