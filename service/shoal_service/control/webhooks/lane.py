"""LaneDelivery: delivers one lane, the events of one job to one hook, in order, up to the first failure.

Called by `WebhookDelivery`, in one task per lane. `core/webhooks` decides which events are sent, and what follows from
a failure; the store keeps both. Nothing of a message but its event's number and its job reaches the log.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shoal_service.clock import Clock
from shoal_service.control.webhooks.message import JobFacts, body_of, headers_of, message_id
from shoal_service.control.webhooks.notifier import Notifier
from shoal_service.control.webhooks.secrets import Secrets, SecretUnusable
from shoal_service.control.webhooks.sender import Sender
from shoal_service.control.webhooks.slots import SlotLimits, Slots
from shoal_service.control.webhooks.threads import Threads
from shoal_service.core.events.service import WebhookGaveUp
from shoal_service.core.webhooks.retries import Retries, RetryPolicy, after_failure
from shoal_service.core.webhooks.rules import WebhookRules
from shoal_service.core.webhooks.selection import OF_JOBS, ServiceWebhook, selects
from shoal_service.store import histories, webhook_lanes
from shoal_service.store.store import Store
from shoal_service.store.webhook_lanes import JOB, SERVICE, Failure, Lane
from shoal_service.telemetry.webhook_tallies import DeliveryOutcome, WebhookTallies
from shoal_service.views import EventView
from shoal_workers.contract.webhooks.spec import WebhookSpec

_log = logging.getLogger(__name__)
_BATCH = 200
"""Events that are read at once."""
_SKIPPED = 100
"""The stored cursor of a hook moves after this many events that the hook does not select; fewer are only remembered."""
_KNOWN_JOBS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """Durations in seconds."""

    secrets: Secrets
    rules: WebhookRules
    """What hooks of specs may do."""
    hooks: tuple[ServiceWebhook, ...] = ()
    """Those of the settings."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    answer_s: float = 10.0
    """Time for one attempt, until the status of the answer."""
    slots: SlotLimits = field(default_factory=SlotLimits)


@dataclass(frozen=True, slots=True)
class _Job:
    facts: JobFacts
    hooks: tuple[WebhookSpec, ...]


class NotOwner(Exception):
    """The lease has another owner or epoch now."""


class LaneDelivery:
    """For all lanes of this process. On the event loop's thread."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: WebhookConfig,
        tallies: WebhookTallies,
        threads: Threads,
        *,
        owns: Callable[[int], bool],
    ) -> None:
        """`owns(epoch)`: whether this process still has the lease of this epoch."""
        self._store = store
        self._clock = clock
        self._secrets = config.secrets
        self._policy = config.retries
        self._tallies = tallies
        self._threads = threads
        self._owns = owns
        self._by_name = {SERVICE + hook.name: hook for hook in config.hooks}
        self._rules = config.rules
        self._sender = Sender(config.answer_s)
        self._sender_of_specs = Sender(config.answer_s, config.rules)
        self._notifier = Notifier(config.answer_s)
        self._slots = Slots(config.slots)
        self._jobs: dict[str, _Job] = {}

    async def close(self) -> None:
        await self._sender.close()
        await self._sender_of_specs.close()
        self._notifier.close()

    async def deliver(self, lane: Lane, passed: int | None, epoch: int) -> Lane | int:
        """The number of the last event of the job: all are delivered. A lane: an attempt has failed, and the lane has
        the time of the next one.

        Args:
            passed: number of the last event that was looked at before; None: this process has not looked yet.

        Raises:
            NotOwner, LeaseLost, StoreUnavailable
        """
        job = await self._job(lane.job_id)
        hook = self._by_name.get(lane.hook) or _of_spec(job, lane.hook)
        patterns = hook.events if hook is not None else ()
        seen = max(lane.seq, passed or 0)
        while events := await self._threads(
            self._store.reading(histories.read_events), lane.job_id, after=seen, limit=_BATCH
        ):
            for number, event in enumerate(events):
                if hook is not None and selects(patterns, event.type):
                    error = await self._attempt(hook, lane, event, job.facts, epoch)
                    if error:
                        waiting = [one for one in events[number:] if selects(patterns, one.type)]
                        return await self._failed(hook, lane, waiting, error, epoch)
                    lane = await self._settled(lane, event.seq, 1, epoch)
                seen = event.seq
        if seen - lane.seq >= _SKIPPED or (passed is None and seen > lane.seq):
            await self._settled(lane, seen, 0, epoch)
        return seen

    async def _attempt(self, hook: WebhookSpec, lane: Lane, event: EventView, job: JobFacts, epoch: int) -> str:
        """Empty: the receiver has accepted the event; otherwise why not."""
        async with self._slots.one(hook.receiver, has_failed=lane.retries.num_failed > 0):
            if not self._owns(epoch):
                raise NotOwner
            began_mono = self._clock.monotonic()
            try:
                error = await self._send(hook, event, job)
            except SecretUnusable as unusable:
                error = f"was not called: {unusable}"
        self._tallies.seconds.observe(self._clock.monotonic() - began_mono, _label(lane))
        self._count(lane, DeliveryOutcome.FAILED if error else DeliveryOutcome.DELIVERED)
        return error

    async def _send(self, hook: WebhookSpec, event: EventView, job: JobFacts) -> str:
        is_of_service = isinstance(hook, ServiceWebhook)
        if not is_of_service and (words := self._rules.refusal_of_secret(hook, job.project)):
            return f"was not called: {words}"
        if hook.is_apprise:
            url = await self._threads(self._secrets.url, hook.secret)
            return await self._notifier.send(url, event, job)
        key = await self._threads(self._secrets.key, hook.secret)
        body = body_of(event, job)
        headers = headers_of(message_id(job.id, event.seq), body, key, self._clock.time())
        sender = self._sender if is_of_service else self._sender_of_specs
        return await sender.post(hook.url, headers, body)

    async def _settled(self, lane: Lane, seq: int, delivered: int, epoch: int) -> Lane:
        now = self._clock.time()
        await self._threads(self._store.writing(webhook_lanes.settle, epoch), lane, seq, delivered=delivered, now=now)
        return replace(lane, seq=seq, retries=Retries() if delivered else lane.retries)

    async def _failed(
        self, hook: WebhookSpec, lane: Lane, waiting: Sequence[EventView], error: str, epoch: int
    ) -> Lane:
        """The first of the waiting events has failed. The lane, with its next attempt."""
        now = self._clock.time()
        verdict = after_failure(
            lane.retries,
            [event.at for event in waiting],
            now=now,
            spread=zlib.crc32(repr(lane.key).encode()) / 2**32,
            policy=self._policy,
        )
        lost, left = waiting[: verdict.num_given_up], waiting[verdict.num_given_up :]
        failure = Failure(
            retries=verdict.retries,
            error=error,
            seq=lost[-1].seq if lost else lane.seq,
            num_given_up=len(lost),
            waiting_since=left[0].at if left else None,
        )
        gave_up = _gave_up(hook, lane, lost, failure, now) if lost else None
        fields = {"job": lane.job_id, "hook": lane.hook, "receiver": hook.receiver}
        _log.warning("webhooks.failed", extra={**fields, "error": error, "reason": verdict.reason})
        await self._threads(self._store.writing(webhook_lanes.fail, epoch), lane, failure, gave_up, now=now)
        self._count(lane, DeliveryOutcome.GAVE_UP, len(lost))
        return replace(lane, seq=failure.seq, retries=verdict.retries)

    async def _job(self, job_id: str) -> _Job:
        """Name, project, user and webhooks of a job never change."""
        if job_id not in self._jobs:
            if len(self._jobs) >= _KNOWN_JOBS:
                self._jobs.clear()
            spec = (await self._threads(self._store.get_job, job_id)).spec
            facts = JobFacts(id=job_id, name=spec.name, project=spec.project, user=spec.user)
            self._jobs[job_id] = _Job(facts, spec.webhooks)
        return self._jobs[job_id]

    def _count(self, lane: Lane, outcome: DeliveryOutcome, amount: int = 1) -> None:
        self._tallies.outcomes.add(_label(lane), outcome, amount=amount)


def _gave_up(hook: WebhookSpec, lane: Lane, lost: Sequence[EventView], failure: Failure, now: float) -> WebhookGaveUp:
    since = failure.retries.failing_since
    return WebhookGaveUp(
        hook=lane.hook,
        receiver=hook.receiver,
        num_events=len(lost),
        first_seq=lost[0].seq,
        last_seq=lost[-1].seq,
        failing_s=0.0 if since is None else now - since,
        error=failure.error,
    )


def _of_spec(job: _Job, hook: str) -> WebhookSpec | None:
    """None: a hook of the settings that was removed, or a spec that cannot be read any more."""
    number = int(hook.removeprefix(JOB)) if hook.startswith(JOB) else len(job.hooks)
    return job.hooks[number] if number < len(job.hooks) else None


def _label(lane: Lane) -> str:
    """Label of the hook in metrics."""
    return lane.hook.removeprefix(SERVICE) if lane.hook.startswith(SERVICE) else OF_JOBS
