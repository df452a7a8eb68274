"""What is remembered of hangs, slow workers and lost nodes, so that a repeated fault is treated differently."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_service.core.attempt.state.incident import Incident
from shoal_workers.contract.errors.classes import ErrorClass
from shoal_workers.contract.messages import ExitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A worker was lost on this node."""

    node_id: str
    at: float
    worker_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The last hang that was seen."""

    step: int
    """Completed steps at the time."""
    index: int
    """The worker that stood still first."""
    is_repeated: bool = False
    """The group has hung at this step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedFault:
    """The last exception for which workers were replaced."""

    step: int
    """Completed steps at the time."""
    kind: ExitKind
    error_class: ErrorClass
    times: int = 1
    """In a row at this step."""

    def is_like(self, other: RaisedFault) -> bool:
        return (self.step, self.kind, self.error_class) == (other.step, other.kind, other.error_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's process died, and its exit status is not known yet."""

    worker_id: str
    rank: int
    generation: int
    step: int
    """Completed steps at the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The last crash of a worker: it was killed by a signal that its own code caused."""

    words: str
    """The signal and the place; equal words are the same place."""
    step: int
    """Completed steps at the first of them."""
    generation: int
    """Of the last of them."""
    times: int = 1
    """Groups in a row that crashed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedIncident:
    """It may still change: a silent node is declared dead, or the exit status of a worker becomes known."""

    incident: Incident
    closed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    hang: Hang | None = None
    raised: RaisedFault | None = None
    deaths: tuple[Death, ...] = ()
    explained: tuple[str, ...] = ()
    """Ids of the workers whose exit status was reported last. Several witnesses, and a supervisor after a restart, may
    ask for the same one."""
    crash: Crash | None = None
    losses: tuple[NodeLoss, ...] = ()
    """Recent ones."""
    suspected: dict[str, float] = field(default_factory=dict)
    """By node id: when it was last put on probation."""
    silences: dict[str, ClosedIncident] = field(default_factory=dict)
    """By node id: the closed incidents of nodes that are silent still."""
    last_closed: ClosedIncident | None = None
    no_straggler_before: int = 0
    """Step before which no other straggler is named."""
    is_memory_scarce: bool = False
    """A worker was killed for lack of memory: new ones touch none before they need it."""
