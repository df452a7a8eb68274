"""What is remembered of hangs, slow workers and lost nodes, so that a repeated fault is treated differently."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A worker was lost on this node."""

    node_id: str
    at: float


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
class Health:
    hang: Hang | None = None
    losses: tuple[NodeLoss, ...] = ()
    """Recent ones."""
    suspected: dict[str, float] = field(default_factory=dict)
    """By node id: when it was last put on probation."""
    no_straggler_before: int = 0
    """Step before which no other straggler is named."""
