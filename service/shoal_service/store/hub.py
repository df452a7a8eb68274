"""Hub: notifies subscribers in this process that a job has changed. `Store.write` publishes after each commit.

A notification is only a hint, the tables hold the state. A reader subscribes first, then reads, then waits, so it
misses no change. The hub does not know what other processes commit: a reader on a control plane without the lease must
also read the tables again about every second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

_log = logging.getLogger(__name__)
Listener = Callable[[str], object]
REQUESTS = "requests"
"""A topic in place of a job's id: what a user has asked for, and what has freed workers."""


def requests_of(job_id: str) -> str:
    """A topic: the part of REQUESTS that is about one job."""
    return f"{REQUESTS} of {job_id}"


class Hub:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[str | None, set[Subscription]] = {}

    def subscribe(self, listener: Listener, job_id: str | None = None) -> Subscription:
        """Calls `listener(job_id)` after each commit to that job (None means any job; REQUESTS: any job, without
        the reports of its progress; a topic: see `announce`), until the subscription is closed.

        The listener runs on the committing thread and must not block. From asyncio:
        `hub.subscribe(lambda _: loop.call_soon_threadsafe(event.set), job_id)`.
        """
        subscription = Subscription(self, listener, job_id)
        with self._lock:
            self._subscriptions.setdefault(job_id, set()).add(subscription)
        return subscription

    def publish(self, job_id: str, *, is_request: bool = False) -> None:
        """`is_request`: a user has asked for something, or workers are free now: the scheduler may have to decide."""
        keys = (job_id, None, REQUESTS, requests_of(job_id)) if is_request else (job_id, None)
        with self._lock:
            listening = [subscriber for key in keys for subscriber in self._subscriptions.get(key, ())]
        for subscription in listening:
            subscription.notify(job_id)

    def announce(self, topic: str) -> None:
        """Calls `listener(topic)` of those who subscribe to exactly this topic. It is for what users do not see as a
        change of a job."""
        with self._lock:
            listening = [*self._subscriptions.get(topic, ())]
        for subscription in listening:
            subscription.notify(topic)

    @property
    def num_subscriptions(self) -> int:
        with self._lock:
            return sum(len(group) for group in self._subscriptions.values())

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            group = self._subscriptions.get(subscription.job_id, set())
            group.discard(subscription)
            if not group:
                self._subscriptions.pop(subscription.job_id, None)


class Subscription:
    """A subscription. Close it, or use it as a context manager. The hub holds a reference until then."""

    def __init__(self, hub: Hub, listener: Listener, job_id: str | None) -> None:
        self._hub = hub
        self._listener = listener
        self.job_id = job_id

    def notify(self, job_id: str) -> None:
        try:
            self._listener(job_id)
        except Exception:  # e.g. the listener's event loop is closed: the commit is done, so the caller must not fail
            _log.exception("subscription.failed", extra={"job": job_id})
            self.close()

    def close(self) -> None:
        self._hub.remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
