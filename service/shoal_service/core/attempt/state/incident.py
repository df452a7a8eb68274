"""Incident: what went wrong, and what it has cost so far. A value; `faults.blame` opens and closes it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.attempt.faults.table import FAULTS, Blame, action_of
from shoal_workers.contract.job import IncidentCause, StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
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
    state_source: StateSource | None = None
    bytes_moved: int | None = None

    @property
    def is_suspicion(self) -> bool:
        """The group broke, and nobody is known to be at fault: a better witness may still say who was."""
        return not self.ranks and FAULTS[self.cause].blames is Blame.UNKNOWN

    @property
    def action(self) -> str:
        """What was done about it so far."""
        return action_of(self.cause, self.from_workers, self.to_workers, num_spares=self.num_spares)

    @property
    def detect_s(self) -> float | None:
        return seconds_between(self.last_sign_at, self.at)

    @property
    def quiesce_s(self) -> float | None:
        return seconds_between(self.at, self.quiesced_at)

    @property
    def plan_s(self) -> float | None:
        return seconds_between(self.quiesced_at, self.forming_at)

    def first_step_s(self, closed_at: float | None) -> float | None:
        return seconds_between(self.formed_at, closed_at)

    def recovery_s(self, closed_at: float | None) -> float | None:
        """`closed_at`: end of the first completed step of the next generation."""
        return seconds_between(self.at, closed_at)


def seconds_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
