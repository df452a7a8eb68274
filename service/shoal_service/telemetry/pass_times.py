"""PassTimes: how long the passes of the control loop and the decisions of its policy take. Written by the loop."""

from __future__ import annotations

from shoal_service.telemetry.service_metrics import SCHEDULER_DECIDE_SECONDS, SCHEDULER_PASS_SECONDS
from shoal_service.telemetry.tallies import Count, Durations


class PassTimes:
    """How long the scheduler's passes and decisions take in one process, and how many passes failed."""

    def __init__(self) -> None:
        self.passes = Durations(SCHEDULER_PASS_SECONDS)
        self.decisions = Durations(SCHEDULER_DECIDE_SECONDS)
        self.failures = Count()
