"""Incident: what went wrong, what it cost so far, and how it is shown. Values only; `blame` opens and closes them."""

from __future__ import annotations

from shoal_service.core.attempt.faults.actions import action_of
from shoal_service.views import IncidentView
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import IncidentCause


class Incident(Frozen):
    """The open incident; times are wall-clock."""

    id: int
    cause: IncidentCause
    witness: str
    ranks: tuple[int, ...] = ()
    worker_ids: tuple[str, ...] = ()
    node_id: str = ""
    generation: int
    at: float
    """When the supervisor took notice."""
    last_sign_at: float | None = None
    """Newest sign before `at`: the death of the worker as its node saw it (20-40 ms late), the report of a survivor
    whose collective broke, or else a beat of the lost member. The difference is the time to detect it; where nothing
    but the beat is known (a node that is gone, a hang) it is an upper bound."""
    from_workers: int
    from_layout: str = ""
    to_layout: str | None = None
    message: str = ""
    quiesced_at: float | None = None
    forming_at: float | None = None
    form_s: float | None = None
    restore_s: float | None = None
    formed_at: float | None = None
    to_workers: int | None = None
    num_spares: int = 0
    """Members of the new group that were not in the one before."""
    step_before: int = 0
    steps_lost: int | None = None
    state_source: str | None = None
    """"memory", "checkpoint" or "initial"."""
    bytes_moved: int | None = None

    @property
    def is_suspicion(self) -> bool:
        """The group broke, and nobody is known to be at fault: a better witness may still say who was."""
        return not self.ranks and self.cause in (
            IncidentCause.COLLECTIVE_FAILED,
            IncidentCause.FORM_FAILED,
            IncidentCause.SNAPSHOT_LOST,
        )


def view_of(incident: Incident, *, now: float | None) -> IncidentView:
    """What the incident cost so far; `now` closes it: the first step of the new generation is done."""
    return IncidentView(
        id=incident.id,
        cause=incident.cause,
        witness=incident.witness,
        ranks=incident.ranks,
        worker_ids=incident.worker_ids,
        node_id=incident.node_id,
        generation=incident.generation,
        at=incident.at,
        from_workers=incident.from_workers,
        to_workers=incident.to_workers,
        detect_s=_between(incident.last_sign_at, incident.at),
        quiesce_s=_between(incident.at, incident.quiesced_at),
        plan_s=_between(incident.quiesced_at, incident.forming_at),
        form_s=incident.form_s,
        restore_s=incident.restore_s,
        first_step_s=_between(incident.formed_at, now),
        recovery_s=_between(incident.at, now),
        state_source=incident.state_source,
        bytes_moved=incident.bytes_moved,
        steps_lost=incident.steps_lost,
        from_layout=incident.from_layout,
        to_layout=incident.to_layout,
        action=action_of(incident.cause, incident.from_workers, incident.to_workers, num_spares=incident.num_spares),
        closed=now is not None,
        message=incident.message,
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
