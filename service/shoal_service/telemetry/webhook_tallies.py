"""WebhookTallies: what this process has delivered to the receivers of webhooks. Written by `control/webhooks.py`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from shoal_service.core.webhooks import OF_JOBS
from shoal_service.telemetry.service_metrics import WEBHOOK_SECONDS
from shoal_service.telemetry.tallies import Count, Durations


class DeliveryOutcome(StrEnum):
    """Outcome of one attempt, or of an event whose attempts have ended."""

    DELIVERED = "delivered"
    FAILED = "failed"
    GAVE_UP = "gave_up"


class WebhookTallies:
    """What the webhooks of one process have delivered; thread-safe."""

    def __init__(self, hooks: Iterable[str] = ()) -> None:
        """`hooks`: names of the hooks of the settings."""
        self.hooks = (*sorted(hooks), OF_JOBS)
        self.seconds = Durations(WEBHOOK_SECONDS)
        self.outcomes = Count()
        for hook in self.hooks:
            for outcome in DeliveryOutcome:
                self.outcomes.add(hook, outcome, amount=0)  # `increase()` sees the first one only after a 0
