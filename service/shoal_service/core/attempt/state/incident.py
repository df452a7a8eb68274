"""Incident: what went wrong, and what it has cost so far. A value; `faults.blame` opens and closes it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.attempt.faults.table import FAULTS, Blame, action_of
from shoal_service.core.node_loss import NodeLossBound
from shoal_workers.contract.job import IncidentCause, StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBefore:
    """The group that was lost."""

    generation: int
    num_workers: int
    layout: str = ""
    step: int = 0
    """Its newest completed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAfter:
    """The next group: what was decided when it began to form, and what it reported once it was formed."""

    forming_at: float
    num_workers: int
    layout: str
    num_spares: int
    """Its workers that were not in the group before."""
    state_source: StateSource
    form_s: float | None = None
    restore_s: float | None = None
    bytes_moved: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """The open incident; times are wall-clock."""

    id: int
    cause: IncidentCause
    witness: str
    message: str = ""
    ranks: tuple[int, ...] = ()
    worker_ids: tuple[str, ...] = ()
    node_id: str = ""
    before: GroupBefore
    at: float
    """When the supervisor took notice."""
    last_sign_at: float | None = None
    """Newest sign before `at`: the death of the worker as its node saw it (20-40 ms late), the report of a survivor
    whose collective failed, or else the last progress of the lost worker. The difference is the time to detect it. If
    only the progress is known (a dead node, a hang) the difference is an upper bound."""
    quiesced_at: float | None = None
    """When every worker had left `run`."""
    after: GroupAfter | None = None
    formed_at: float | None = None
    """When `after` was formed; None again if it was lost before its first step."""
    steps_lost: int | None = None
    node_loss: NodeLossBound | None = None
    """A node was lost: the bound that was in force."""

    @property
    def is_suspicion(self) -> bool:
        """No worker is known to be at fault; a later witness may still name one."""
        return not self.ranks and FAULTS[self.cause].blames is Blame.UNKNOWN

    @property
    def action(self) -> str:
        """What was done about it so far."""
        to_workers, num_spares = (self.after.num_workers, self.after.num_spares) if self.after else (None, 0)
        return action_of(self.cause, self.before.num_workers, to_workers, num_spares=num_spares)

    @property
    def detect_s(self) -> float | None:
        return seconds_between(self.last_sign_at, self.at)

    @property
    def quiesce_s(self) -> float | None:
        return seconds_between(self.at, self.quiesced_at)

    @property
    def plan_s(self) -> float | None:
        return seconds_between(self.quiesced_at, self.after.forming_at if self.after else None)

    def first_step_s(self, closed_at: float | None) -> float | None:
        return seconds_between(self.formed_at, closed_at)

    def recovery_s(self, closed_at: float | None) -> float | None:
        """`closed_at`: end of the first completed step of the next generation."""
        return seconds_between(self.at, closed_at)


def seconds_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
