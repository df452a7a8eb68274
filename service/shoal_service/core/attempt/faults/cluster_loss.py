"""The incident of an attempt that follows one that was lost with its cluster. Pure; called when the attempt begins.

It is open from the start, so the time until the first group runs is booked as recovery, and it closes with the first
completed step, like any other incident.
"""

from __future__ import annotations

from shoal_service.core.attempt.state.incident import GroupBefore, Incident
from shoal_service.core.lost_attempt import LostAttempt
from shoal_workers.contract.job import IncidentCause


def incident_of(lost: LostAttempt, now: float) -> Incident:
    """`now`: the start of the new attempt, which has no survivor to wait for."""
    return Incident(
        id=1,
        cause=IncidentCause.CLUSTER_LOST,
        witness="control plane",
        message=lost.message,
        before=GroupBefore(generation=lost.generation, num_workers=lost.workers, layout=lost.layout, step=lost.step),
        at=lost.at,
        last_sign_at=lost.last_report_at,
        quiesced_at=now,
    )
