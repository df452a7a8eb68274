"""The resource of the REST API about webhooks: the state of their delivery. Pure data, as those in `views`."""

from __future__ import annotations

from shoal_workers.contract.base import Frozen


class WebhookView(Frozen):
    """What one hook has delivered, for one job or for all of them, and what it waits for."""

    hook: str
    """`service/NAME`: of the service's settings; `job/N`: number N of the job's spec, from 0."""
    job_id: str | None
    """null: all jobs together."""
    receiver: str
    """Scheme, host and port of the URL."""
    events: tuple[str, ...]
    """The types of events that it selects."""
    delivered: int = 0
    """Events that the receiver has accepted."""
    gave_up: int = 0
    """Events that were given up, because the receiver has not accepted them for too long."""
    failing: int = 0
    """Jobs whose events wait after a failed attempt."""
    waiting_since: float | None = None
    """Time of the oldest event that waits after a failed attempt; null: none does."""
    failing_since: float | None = None
    """First failed attempt since the last success of the job concerned, the earliest of all."""
    next_at: float | None = None
    """The next attempt after a failed one."""
    delivered_at: float | None = None
    """The last success."""
    error: str = ""
    """Error of the last failed attempt; empty if nothing waits."""
