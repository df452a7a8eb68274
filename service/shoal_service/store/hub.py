"""Notifies subscribers in this process of each commit that changes a job.

`Store.write` publishes after the commit. A notification is only a hint: the tables hold the state. A reader subscribes
first, then reads, then waits, so it misses no change. The hub does not know what other processes commit, so a reader on
a control plane without the lease must also read the tables about every second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import StrEnum
from types import TracebackType

_log = logging.getLogger(__name__)
Listener = Callable[[str], object]


class Topic(StrEnum):
    """What a listener may subscribe to in place of a job."""

    REQUESTS = "requests"
    """A user has requested something, or workers are free now, so the scheduler may have to decide."""
    ORDERS = "orders"
    """An order to a cluster was written or cancelled."""
    REPORTS = "reports"
    """The gateway of a cluster has reported or answered."""
    DIRECTIVES = "directives"
    """A directive for the supervisor of a job was written."""

    def narrow_to(self, name: str) -> str:
        """Return the part of the topic that is about this job or cluster."""
        return f"{self} of {name}"


class Hub:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[str | None, set[Subscription]] = {}

    def subscribe(self, listener: Listener, topic: str | None = None) -> Subscription:
        """Call the listener after each commit that publishes this topic, until the subscription is closed.

        The topic is the id of a job, a `Topic`, or None for every job. The listener gets the id of the job, or the
        announced topic. It runs on the committing thread and must not block. From asyncio:
        `hub.subscribe(lambda _: loop.call_soon_threadsafe(event.set), job_id)`.
        """
        subscription = Subscription(self, listener, topic)
        with self._lock:
            self._subscriptions.setdefault(topic, set()).add(subscription)
        return subscription

    def publish(self, job_id: str, *, is_request: bool = False) -> None:
        """Notify the subscribers of a job. `is_request`: those of Topic.REQUESTS too."""
        requests = (Topic.REQUESTS, Topic.REQUESTS.narrow_to(job_id)) if is_request else ()
        self._notify(job_id, (job_id, None, *requests))

    def announce(self, topic: str) -> None:
        """Notify the subscribers of exactly this topic. It is for what users do not see as a change of a job."""
        self._notify(topic, (topic,))

    @property
    def num_subscriptions(self) -> int:
        with self._lock:
            return sum(len(subscribers) for subscribers in self._subscriptions.values())

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            subscribers = self._subscriptions.get(subscription.topic, set())
            subscribers.discard(subscription)
            if not subscribers:
                self._subscriptions.pop(subscription.topic, None)

    def _notify(self, message: str, topics: Iterable[str | None]) -> None:
        with self._lock:
            notified = [subscription for topic in topics for subscription in self._subscriptions.get(topic, ())]
        for subscription in notified:
            subscription.notify(message)


class Subscription(AbstractContextManager["Subscription"]):
    """Notifies one listener. Close it, or use it as a context manager; the hub holds a reference until then."""

    def __init__(self, hub: Hub, listener: Listener, topic: str | None) -> None:
        self._hub = hub
        self._listener = listener
        self.topic = topic

    def notify(self, message: str) -> None:
        try:
            self._listener(message)
        except Exception:  # e.g. the listener's event loop is closed: the commit is done, so the caller must not fail
            _log.exception("subscription.failed", extra={"job": message})
            self.close()

    def close(self) -> None:
        self._hub.remove(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
