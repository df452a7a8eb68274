"""The group's progress: what changes with every step and every poll of a healthy group. See `attempt.essential`."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_workers.contract.messages import Phase
from shoal_workers.contract.worker_reports import SnapshotCost, SnapshotsStopped


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStamp:
    """The newest change of a worker's progress counter in this generation."""

    counter: int
    step: int
    phase: Phase
    at: float
    """By the worker's own clock."""
    seen_at: float
    """By our clock: when the poll was answered, less how long the counter had stood still by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    step: int = 0
    """Newest completed step of the current generation's line."""
    furthest_step: int = 0
    """Newest step that any generation of the attempt has completed: a step done again is none."""
    step_times: tuple[float, ...] = ()
    """Seconds of the last steps, newest last."""
    slowest_steps: tuple[float, ...] = ()
    """Seconds of the slowest step of each block of steps, newest last; without the first steps of generations."""
    num_measured: int = 0
    """Steps in these blocks, since the attempt began."""
    advanced_at: float = 0.0
    """When the group formed, or last completed a step."""
    stamps: dict[int, ProgressStamp] = field(default_factory=dict)
    """By worker index: workers of this generation."""
    starting: dict[int, ProgressStamp] = field(default_factory=dict)
    """By worker index: workers that are not warm yet, and report progress of their preparation."""
    answered_at: dict[int, float] = field(default_factory=dict)
    """By worker index: when it last answered a poll."""
    slow_steps: dict[int, int] = field(default_factory=dict)
    """By worker index: for how many steps in a row it has been slower than the others."""
    snapshots: SnapshotCost | None = None
    """The newest report of this generation."""
    stopped: dict[int, SnapshotsStopped] = field(default_factory=dict)
    """By rank: those that have no memory for snapshots in this generation."""
    last_event_at: float = 0.0
    """When the machine last handled an event."""
    is_late: bool = False
    """That was more than timeouts.absence_s after the event before."""
