"""What a supervisor forwards to the metrics hook of a job, through one of its workers, and the answer.

supervisor --- forward_metrics(batch) -----------> worker    control thread: returns immediately with the progress
"""

from __future__ import annotations

from shoal_workers.contract.base import Frozen


class MetricPoint(Frozen):
    """Values of one step."""

    seq: int
    """Counted by the supervisor's process, from 1."""
    step: int
    at: float
    """Wall-clock time, seconds since the epoch."""
    values: dict[str, float]


class MetricsBatch(Frozen):
    """Points that are not logged yet, the oldest first. A point that was sent before is ignored."""

    points: tuple[MetricPoint, ...] = ()
    end: str = ""
    """The attempt ends, and no further point comes: "succeeded", "failed", "cancelled", "paused" or "queued"."""


class MetricsProgress(Frozen):
    """How far the hook is."""

    logged: int = 0
    """All points up to this `seq` are logged."""
    error: str = ""
    """Why the hook logs nothing now; empty: it does."""
    has_ended: bool = False
    """Its `end` was called."""


class HookJob(Frozen):
    """The job, as a hook gets it."""

    id: str
    name: str
    project: str
    user: str
    labels: dict[str, str]
    settings: dict[str, object]
    """The spec, without the secrets' sources and the webhooks."""
