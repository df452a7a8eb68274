"""A lease in wall-clock time, and waiting for a state of the delivery."""

import threading
import time
from collections.abc import Callable

import pytest

from kit.webhooks import LONGEST_S
from shoal_service.store import Lease, Store, webhook_lanes
from shoal_service.telemetry.tallies import WebhookTallies
from shoal_service.views import WebhookView


@pytest.fixture
def owned(store: Store) -> Lease:
    lease = store.acquire_lease("owner-1", ttl_s=3600.0, now=time.time())
    assert lease is not None
    return lease


@pytest.fixture
def reach(store: Store) -> Callable[..., WebhookView | None]:
    """Waits until the first hook that is shown, of a job or of all, is as the test wants it. Nobody is notified of the
    cursors, so it looks again and again."""

    def _reach(job_id: str | None, is_reached: Callable[[WebhookView | None], bool]) -> WebhookView | None:
        deadline_mono = time.monotonic() + LONGEST_S
        pause = threading.Event()
        while not is_reached(view := next(iter(store.reading(webhook_lanes.read_views)(job_id)), None)):
            assert time.monotonic() < deadline_mono, view
            pause.wait(0.01)
        return view

    return _reach


@pytest.fixture
def reach_count() -> Callable[..., None]:
    """Waits until deliveries of a hook have ended in this way so often."""

    def _reach(tallies: WebhookTallies, hook: str, outcome: str, number: int) -> None:
        deadline_mono = time.monotonic() + LONGEST_S
        pause = threading.Event()
        while tallies.outcomes.values().get((hook, outcome), 0) < number:
            assert time.monotonic() < deadline_mono, tallies.outcomes.values()
            pause.wait(0.01)

    return _reach
