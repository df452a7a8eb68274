"""Whom an incident suspects: from its cause, from what the ranks that left have seen, from the stacks that were kept.

a worker or a node was lost         that one: its end is the evidence
the ranks suspect a rank            those that most of them name, once all have left
the group stood still               whom they waited for
otherwise                           none, until a witness comes
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.attempt.faults import FAULTS, Blame
from shoal_service.core.attempt.state.attempt import Incident
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import WorkerExit
from shoal_workers.contract.suspects import Resource, Suspect

_RESOURCES = {
    IncidentCause.CORRUPTED: Resource.NUMBERS,
    IncidentCause.NON_FINITE: Resource.NUMBERS,
    IncidentCause.STRAGGLER: Resource.COMPUTE,
    IncidentCause.UNREACHABLE: Resource.NETWORK,
    IncidentCause.NODE_UNREACHABLE: Resource.NETWORK,
}


def suspect_of(incident: Incident, exits: Sequence[WorkerExit], *, all_left: bool) -> Suspect | None:
    """Name a suspect without stacks. If a standstill has stacks, they are looked at first.

    Args:
        exits: of the ranks of the group that have left it.
        all_left: no rank is in the group any more, so no further exit will come.
    """
    named = [one.suspect for one in exits if one.suspect is not None]
    if named and all_left:
        agreed = {rank for one in named for rank in one.ranks}
        if agreed and 2 * len(agreed) <= max(incident.before.num_workers, 2):
            evidence = tuple(dict.fromkeys(words for one in named for words in one.evidence))
            return Suspect(resource=named[0].resource, ranks=tuple(sorted(agreed)), evidence=evidence)
    if not incident.ranks or FAULTS[incident.cause].blames not in (Blame.WORKER, Blame.NODE):
        return None
    words = [FAULTS[incident.cause].words, incident.message, f"noticed by: {incident.witness}"]
    resource = _RESOURCES.get(incident.cause, Resource.PROCESS)
    return Suspect(resource=resource, ranks=incident.ranks, evidence=tuple(dict.fromkeys(w for w in words if w)))
