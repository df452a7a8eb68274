"""Sends the events of jobs to the receivers of webhooks: at least once, and in order for each job.

    WebhookDelivery   decides which lanes have a task: one lane is one hook for one job
    LaneDelivery      sends the events of one lane up to the first failure, then moves the cursor in the store
    Sender, Notifier  one attempt: a signed POST, or a mail or chat message through apprise
    Slots             attempts at a time, so that a receiver that is slow or away delays no other one

`shoal serve` runs it beside the control loop, and only the owner of the lease delivers; each write of a cursor is
guarded by the lease's epoch. After a crash, or a change of owner, events after the stored cursor are sent again with
the same ids. `core/webhooks.py` decides what is sent and when it is tried again. A secret is never stored, logged or
shown, and nothing of a message but its event's number and its job reaches the log.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import importlib.util
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

import httpx
from pydantic_core import to_json

from shoal_service.clock import Clock, cancel_all, wait_for_any
from shoal_service.control.background_calls import Threads
from shoal_service.core.events import Severity, WebhookGaveUp
from shoal_service.core.webhooks import (
    OF_JOBS,
    Retries,
    RetryPolicy,
    ServiceWebhook,
    WebhookRules,
    after_failure,
    refused,
    selects,
    unknown_patterns,
)
from shoal_service.store import Lease, LeaseLost, Store, StoreUnavailable, histories, webhook_lanes
from shoal_service.store.webhook_lanes import JOB, SERVICE, Failure, Lane
from shoal_service.telemetry.tallies import DeliveryOutcome, WaitTallies, WebhookTallies
from shoal_service.views import EventView
from shoal_workers.contract import JobSpec, WebhookSpec
from shoal_workers.contract.base import FieldError
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.recently_used import RecentlyUsed

_BASE64 = "whsec_"
"""Beginning of a secret in the form of Standard Webhooks: the rest is base64."""
_MAX_BYTES = 4096
_MIN_BYTES = 16
_log = logging.getLogger(__name__)
_POLL_S = 2.0
"""Seconds between two looks for new events: other control planes write events too, and this process is not notified of
them."""
_MIN_PASS_S = 0.1
_CLOCKS_APART_S = 60.0
"""Largest difference between the clocks of two control planes, and longest transaction."""
_READ_ALL_S = 600.0
"""Seconds between two readings of all jobs, in case the clocks are further apart."""
_STORE_THREADS = 2
_Key = tuple[str, str]
_BATCH = 200
"""Most events that are read at once."""
_SKIPPED = 100
"""The stored cursor of a hook moves after this many events that the hook does not select; fewer are only remembered."""
_KNOWN_JOBS = 4096
_CONNECT_S = 5.0
_KEPT_ALIVE = 64
MISSING = "the service has no apprise: install it where `shoal serve` runs, with pip install 'shoal[apprise]'"
_APPRISE_THREADS = 4
_TYPES = {Severity.SUCCESS: "success", Severity.WARNING: "warning", Severity.ERROR: "failure"}


def check_webhooks(spec: JobSpec, rules: WebhookRules) -> None:
    """Check what the service requires of a spec's webhooks beyond their form. Names are resolved when they are called,
    not here.

    Raises:
        SpecError: a hook names events that no release of this version has, an address or a secret that the rules
            refuse, or needs apprise, which is not installed.
    """
    problems: list[SpecProblem] = []
    for number, hook in enumerate(spec.webhooks):
        unknown, refusal = unknown_patterns(hook.events), rules.refusal_of_receiver(hook)
        messages = (
            ("events", f"no event has the type {', '.join(unknown)}." if unknown else ""),
            ("url", f"{refusal}." if refusal else ""),
            ("secret", rules.refusal_of_secret(hook, spec.project)),
            ("url", f"{MISSING}." if hook.is_apprise and not is_installed() else ""),
        )
        problems += [SpecProblem(path=f"webhooks.{number}.{key}", message=text) for key, text in messages if text]
    if problems:
        raise SpecError(tuple(problems))


class WebhookDelivery:
    """Decides which lanes have a task. `run` returns after `stop` is set, once: it closes the connections."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: WebhookConfig,
        *,
        lease: Callable[[], Lease | None],
        tallies: WebhookTallies | None = None,
    ) -> None:
        """`lease`: that of this process, None if it has none; called on the loop."""
        self._store = store
        self._clock = clock
        self._config = config
        self._lease = lease
        self._threads = Threads(_STORE_THREADS, "webhooks")
        tallies = tallies or WebhookTallies(hook.name for hook in config.hooks)
        self._delivery = LaneDelivery(store, clock, config, tallies, self._threads, owns=self._owns)
        self._epoch: int | None = None
        """Epoch of the lease under which everything below was read."""
        self._lost_epoch: int | None = None
        """The store has refused a write under this epoch, and the control loop may not know yet."""
        self._read_at: float | None = None
        """Wall-clock time of the last reading of the backlog."""
        self._read_all_mono = 0.0
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._waiting: dict[_Key, Lane] = {}
        """Lanes that have failed and wait for their next attempt."""
        self._passed: dict[_Key, int] = {}
        """Number of the last event that this process has looked at, if it is after the stored cursor."""
        self._woken = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Delivers while this process owns the lease."""
        loop = asyncio.get_running_loop()
        try:
            with self._store.subscribe(lambda _: loop.call_soon_threadsafe(self._woken.set)):
                while not stop.is_set():
                    self._woken.clear()
                    try:
                        await self._pass()
                    except Exception as error:
                        self._note(error, "webhooks.pass_failed")
                        await self._drop()
                    await self._wait(stop)
        finally:
            await self._drop()
            await self._delivery.close()
            self._threads.close()

    async def _pass(self) -> None:
        lease = self._lease()
        if lease is None or not self._owns(lease.epoch):
            await self._drop()
            return
        if lease.epoch != self._epoch:
            await self._drop()
        now = self._clock.time()
        if self._epoch is None:
            await self._threads(self._store.writing(webhook_lanes.register, lease.epoch), self._config.hooks, now=now)
            self._epoch = lease.epoch
        mono = self._clock.monotonic()
        since = 0.0
        if self._read_at is not None and mono - self._read_all_mono < _READ_ALL_S:
            since = self._read_at - _CLOCKS_APART_S
        else:
            self._read_all_mono = mono
        lanes = await self._threads(self._store.reading(webhook_lanes.read_backlog), since)
        self._read_at = now
        self._passed = {lane.key: self._passed[lane.key] for lane in lanes if lane.key in self._passed}
        for lane in lanes:
            is_known = lane.key in self._tasks or lane.key in self._waiting
            if not is_known and lane.event_seq > self._passed.get(lane.key, 0):
                self._begin(lane, now)
        for lane in [lane for lane in self._waiting.values() if lane.retries.is_due(now)]:
            self._begin(lane, now)

    def _begin(self, lane: Lane, now: float) -> None:
        if not lane.retries.is_due(now):
            self._waiting[lane.key] = lane
            return
        self._waiting.pop(lane.key, None)
        assert self._epoch is not None
        task = asyncio.get_running_loop().create_task(self._deliver(lane, self._epoch), name=f"webhook {lane.key}")
        self._tasks[lane.key] = task

        def ended(_: asyncio.Task[None]) -> None:
            if self._tasks.get(lane.key) is task:
                del self._tasks[lane.key]
            self._woken.set()

        task.add_done_callback(ended)

    async def _deliver(self, lane: Lane, epoch: int) -> None:
        """Delivers the events of a lane, up to the first failure."""
        passed = self._passed.get(lane.key)
        try:
            end = await self._delivery.deliver(lane, passed, epoch)
        except NotOwner:
            return
        except Exception as error:
            self._note(error, "webhooks.lane_failed", job=lane.job_id, hook=lane.hook)
            next_at = self._clock.time() + self._config.retries.first_s  # the receiver has not failed
            end = replace(lane, retries=replace(lane.retries, next_at=next_at))
        if not self._owns(epoch) or self._epoch != epoch:
            return
        if isinstance(end, Lane):
            self._waiting[lane.key] = end
        else:
            self._passed[lane.key] = end

    def _note(self, error: Exception, event: str, **fields: str) -> None:
        """Log an error of a pass or a lane."""
        if isinstance(error, LeaseLost):
            self._lost_epoch, event = error.epoch, "webhooks.lease_lost"
        is_expected = isinstance(error, LeaseLost | StoreUnavailable)
        extra = {**fields, "error": str(error)}
        _log.log(logging.WARNING if is_expected else logging.ERROR, event, extra=extra, exc_info=not is_expected)

    def _owns(self, epoch: int) -> bool:
        """Return whether this process still has the lease, by its own clock."""
        lease = self._lease()
        if lease is None or lease.epoch != epoch or epoch == self._lost_epoch:
            return False
        return lease.expires_at > self._clock.time()

    async def _drop(self) -> None:
        """Forget everything that was read under the last lease."""
        tasks = list(self._tasks.values())
        self._epoch = self._read_at = None
        self._tasks.clear()
        self._waiting.clear()
        self._passed.clear()
        await cancel_all(tasks)

    async def _wait(self, stop: asyncio.Event) -> None:
        """Wait until something has changed or an attempt is due; after a moment it returns in any case."""
        await wait_for_any(self._clock, stop, timeout_s=_MIN_PASS_S)
        now = self._clock.time()
        due_s = [max(0.0, (lane.retries.next_at or now) - now) for lane in self._waiting.values()]
        await wait_for_any(self._clock, stop, self._woken, timeout_s=min([_POLL_S, *due_s]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """How many attempts may go on at a time."""

    per_receiver: int = 4
    healthy: int = 128
    failing: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """The settings of the delivery. Durations are in seconds."""

    secrets: Secrets
    rules: WebhookRules
    """What hooks of specs may do."""
    hooks: tuple[ServiceWebhook, ...] = ()
    """Hooks of the settings."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    answer_s: float = 10.0
    """Time for one attempt, until the status of the answer."""
    slots: SlotLimits = field(default_factory=SlotLimits)


class NotOwner(Exception):
    """The lease has another owner or epoch now."""


@dataclass(frozen=True, slots=True)
class _Job:
    facts: JobFacts
    hooks: tuple[WebhookSpec, ...]


class LaneDelivery:
    """Delivers the lanes of this process, each in a task of `WebhookDelivery`; on the event loop's thread."""

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
        self._config = config
        self._tallies = tallies
        self._threads = threads
        self._owns = owns
        self._by_name = {SERVICE + hook.name: hook for hook in config.hooks}
        self._sender = Sender(config.answer_s, tallies.waits)
        self._sender_of_specs = Sender(config.answer_s, tallies.waits, config.rules)
        self._notifier = Notifier(config.answer_s, tallies.waits)
        self._slots = Slots(config.slots)
        self._jobs: RecentlyUsed[str, _Job] = RecentlyUsed(_KNOWN_JOBS)

    async def close(self) -> None:
        await self._sender.close()
        await self._sender_of_specs.close()
        self._notifier.close()

    async def deliver(self, lane: Lane, passed: int | None, epoch: int) -> Lane | int:
        """Delivers the events of a lane. Returns the number of the job's last event if all are delivered; if an attempt
        has failed, the lane with the time of the next one.

        Args:
            passed: number of the last event that was looked at before; None if this process has not looked yet.

        Raises:
            NotOwner, LeaseLost, StoreUnavailable
        """
        job = await self._read_job(lane.job_id)
        hook = self._by_name.get(lane.hook) or _find_spec_hook(job, lane.hook)
        patterns = hook.events if hook is not None else ()
        seen = max(lane.seq, passed or 0)
        while events := await self._threads(
            self._store.reading(histories.read_events), lane.job_id, after=seen, limit=_BATCH
        ):
            for number, event in enumerate(events):
                if hook is not None and selects(patterns, event.type):
                    error = await self._attempt(hook, lane, event, job.facts, epoch)
                    if error:
                        waiting = [later for later in events[number:] if selects(patterns, later.type)]
                        return await self._note_failure(hook, lane, waiting, error, epoch)
                    lane = await self._settle(lane, event.seq, 1, epoch)
                seen = event.seq
        if seen - lane.seq >= _SKIPPED or (passed is None and seen > lane.seq):
            await self._settle(lane, seen, 0, epoch)
        return seen

    async def _attempt(self, hook: WebhookSpec, lane: Lane, event: EventView, job: JobFacts, epoch: int) -> str:
        """Make one attempt. Return why the receiver has not accepted the event; empty if it has."""
        async with self._slots.take(hook.receiver, has_failed=lane.retries.num_failed > 0):
            if not self._owns(epoch):  # the lease may have ended during the wait for a slot
                raise NotOwner
            began_mono = self._clock.monotonic()
            try:
                error = await self._send(hook, event, job)
            except SecretUnusable as unusable:
                error = f"was not called: {unusable}"
        self._tallies.seconds.observe(self._clock.monotonic() - began_mono, _make_label(lane))
        self._tallies.outcomes.add(_make_label(lane), DeliveryOutcome.FAILED if error else DeliveryOutcome.DELIVERED)
        return error

    async def _send(self, hook: WebhookSpec, event: EventView, job: JobFacts) -> str:
        is_of_service = isinstance(hook, ServiceWebhook)
        if not is_of_service and (message := self._config.rules.refusal_of_secret(hook, job.project)):
            return f"was not called: {message}"
        if hook.is_apprise:
            url = await self._threads(self._config.secrets.url, hook.secret)
            return await self._notifier.send(url, event, job)
        key = await self._threads(self._config.secrets.key, hook.secret)
        body = make_body(event, job)
        headers = make_headers(message_id(job.id, event.seq), body, key, self._clock.time())
        sender = self._sender if is_of_service else self._sender_of_specs
        return await sender.post(hook.url, headers, body)

    async def _settle(self, lane: Lane, seq: int, delivered: int, epoch: int) -> Lane:
        now = self._clock.time()
        await self._threads(self._store.writing(webhook_lanes.settle, epoch), lane, seq, delivered=delivered, now=now)
        return replace(lane, seq=seq, retries=Retries() if delivered else lane.retries)

    async def _note_failure(
        self, hook: WebhookSpec, lane: Lane, waiting: Sequence[EventView], error: str, epoch: int
    ) -> Lane:
        """Note that the first of the waiting events has failed. Return the lane, with its next attempt."""
        now = self._clock.time()
        verdict = after_failure(
            lane.retries,
            [event.at for event in waiting],
            now=now,
            spread=zlib.crc32(repr(lane.key).encode()) / 2**32,
            policy=self._config.retries,
        )
        lost, left = waiting[: verdict.num_given_up], waiting[verdict.num_given_up :]
        failure = Failure(
            retries=verdict.retries,
            error=error,
            seq=lost[-1].seq if lost else lane.seq,
            num_given_up=len(lost),
            waiting_since=left[0].at if left else None,
        )
        gave_up = _make_gave_up(hook, lane, lost, failure, now) if lost else None
        fields = {"job": lane.job_id, "hook": lane.hook, "receiver": hook.receiver}
        _log.warning("webhooks.failed", extra={**fields, "error": error, "reason": verdict.reason})
        await self._threads(self._store.writing(webhook_lanes.fail, epoch), lane, failure, gave_up, now=now)
        self._tallies.outcomes.add(_make_label(lane), DeliveryOutcome.GAVE_UP, amount=len(lost))
        return replace(lane, seq=failure.seq, retries=verdict.retries)

    async def _read_job(self, job_id: str) -> _Job:
        """Facts of a job that never change: name, project, user and webhooks."""
        job = self._jobs.get(job_id)
        if job is None:
            spec = (await self._threads(self._store.get_job, job_id)).spec
            facts = JobFacts(id=job_id, name=spec.name, project=spec.project, user=spec.user)
            job = _Job(facts, spec.webhooks)
            self._jobs.put(job_id, job)
        return job


def _make_gave_up(
    hook: WebhookSpec, lane: Lane, lost: Sequence[EventView], failure: Failure, now: float
) -> WebhookGaveUp:
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


def _find_spec_hook(job: _Job, hook: str) -> WebhookSpec | None:
    """A hook of a spec; None for a hook of the settings that was removed, or a spec that cannot be read any more."""
    number = int(hook.removeprefix(JOB)) if hook.startswith(JOB) else len(job.hooks)
    return job.hooks[number] if number < len(job.hooks) else None


def _make_label(lane: Lane) -> str:
    """Label of the hook in metrics."""
    return lane.hook.removeprefix(SERVICE) if lane.hook.startswith(SERVICE) else OF_JOBS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a message says about the job."""

    id: str
    name: str
    project: str
    user: str


def message_id(job_id: str, seq: int) -> str:
    """Id of the message about the event with this number. It has no dot, because dots separate the parts of what is
    signed."""
    return f"{job_id}_{seq}"


def make_body(event: EventView, job: JobFacts) -> bytes:
    """The event as `GET /v1/jobs/{id}/events` shows it, with its id and its job; JSON in UTF-8."""
    shown = event.model_dump(mode="json")
    return to_json({"id": message_id(job.id, event.seq), "job": asdict(job), **shown}, inf_nan_mode="null")


def make_headers(identifier: str, body: bytes, key: bytes, now: float) -> Mapping[str, str]:
    """The headers of an attempt at `now`, as Standard Webhooks (www.standardwebhooks.com) defines them.

    webhook-id: job-7h2k9m4x1q0p_17           the same in every attempt, and for every hook
    webhook-timestamp: 1790000000             of this attempt, seconds since the epoch
    webhook-signature: v1,<base64>            HMAC-SHA256 of "<id>.<timestamp>.<body>" with the secret
    """
    timestamp = int(now)
    return {
        "Content-Type": "application/json",
        "User-Agent": "Shoal",
        "webhook-id": identifier,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(identifier, timestamp, body, key),
    }


def signature(identifier: str, timestamp: int, body: bytes, key: bytes) -> str:
    """HMAC-SHA256 (RFC 2104) of id, timestamp and body, in base64, after the version of the scheme."""
    digest = hmac.new(key, f"{identifier}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


@dataclass(eq=False)
class SecretUnusable(FieldError, text="secret {reference}: {reason}"):
    """There is no such secret, or it cannot be used. The message names the reference, never the secret."""

    reference: str
    reason: str


class Secrets:
    """Keys and URLs by reference (see `WebhookSpec.secret`), from environment variables and files of one directory.

    A file is read for each message, so that a secret can be changed without a restart. Thread-safe.
    """

    def __init__(self, variables: Mapping[str, str], directory: Path) -> None:
        self._variables = dict(variables)
        self._directory = directory

    def __repr__(self) -> str:
        return f"Secrets({len(self._variables)} variables, {self._directory})"

    def key(self, reference: str) -> bytes:
        """Read the key that signs. Blocks, if it is in a file. Raises SecretUnusable."""
        return _decode_secret(reference, self._read_secret(reference))

    def url(self, reference: str) -> str:
        """Read the apprise URL. Blocks, if it is in a file. Raises SecretUnusable."""
        text = self._read_secret(reference)
        if not text or len(text.split()) > 1:
            raise SecretUnusable(reference, "it is not one URL; a hook has one, so use more hooks")
        return text

    def _read_secret(self, reference: str) -> str:
        kind, _, name = reference.partition(":")
        text = self._variables.get(name) if kind == "env" else self._read(reference, name)
        if text is None:
            raise SecretUnusable(reference, "the service has no such environment variable")
        return text.strip()

    def _read(self, reference: str, name: str) -> str:
        try:
            with (self._directory / name).open("rb") as file:
                return file.read(_MAX_BYTES).decode()
        except UnicodeDecodeError:
            raise SecretUnusable(reference, "the file is not text") from None
        except OSError as error:
            raise SecretUnusable(reference, f"the file in webhook_secrets_dir: {error.strerror}") from None


def _decode_secret(reference: str, text: str) -> bytes:
    try:
        key = base64.b64decode(text.removeprefix(_BASE64), validate=True) if text.startswith(_BASE64) else text.encode()
    except binascii.Error:
        raise SecretUnusable(reference, f"what follows {_BASE64} is not base64") from None
    if len(key) < _MIN_BYTES:
        raise SecretUnusable(reference, f"it has fewer than {_MIN_BYTES} bytes")
    return key


class Slots:
    """Bounds the attempts that go on at a time, on the event loop's thread.

        one receiver (scheme, host, port)     at most `per_receiver` attempts
        lanes that have not failed            share `healthy` slots
        lanes that have failed                share `failing` slots of their own

    A receiver that hangs takes slots of the healthy lanes only until its first time-out. Waiting attempts get their
    slots in the order in which they have asked.
    """

    def __init__(self, limits: SlotLimits) -> None:
        self._limits = limits
        self._healthy = asyncio.Semaphore(limits.healthy)
        self._failing = asyncio.Semaphore(limits.failing)
        self._receivers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Receivers with attempts now."""

    @asynccontextmanager
    async def take(self, receiver: str, *, has_failed: bool) -> AsyncIterator[None]:
        """Take a slot. It waits for a slot of the receiver first, so that attempts that wait for the receiver take no
        other slot."""
        of_receiver = self._receivers.get(receiver)
        if of_receiver is None:
            of_receiver = self._receivers[receiver] = asyncio.Semaphore(self._limits.per_receiver)
        async with of_receiver, self._failing if has_failed else self._healthy:
            yield


class Sender:
    """Sends one POST to a receiver, on the event loop. Close it after use.

    It follows no redirect, uses no proxy and reads no body of an answer.

    With rules it resolves the receiver's name itself and connects to an address that the rules allow, so that the
    address that was checked is the one that is used, whatever the name server answers next.
    """

    def __init__(self, answer_s: float, waits: WaitTallies, rules: WebhookRules | None = None) -> None:
        """`answer_s`: seconds for a whole attempt, from the connection to the status of the answer. `rules`: for hooks
        of specs; None means those of an administrator."""
        self._answer_s, self._waits = answer_s, waits
        self._http = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,  # neither proxies nor passwords from the environment
            timeout=httpx.Timeout(answer_s, connect=min(_CONNECT_S, answer_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_ALIVE),
            transport=None if rules is None else _Checked(rules),
        )

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> str:
        """Posts the message. Empty: the receiver has accepted it, with a status of 200 to 299. Otherwise why not, in
        words without the URL."""
        try:
            async with self._waits.bounded("webhook", self._answer_s):
                async with self._http.stream("POST", url, headers=headers, content=body) as answer:
                    status = answer.status_code
        except (TimeoutError, httpx.TimeoutException):
            return f"has not answered within {self._answer_s:g} s"
        except httpx.ConnectError as error:
            return f"cannot be reached: {error}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            return f"has broken the connection or the protocol ({type(error).__name__})"
        if 300 <= status < 400:
            return f"has answered {status}: redirects are not followed"
        return "" if 200 <= status < 300 else f"has answered {status}"

    async def close(self) -> None:
        await self._http.aclose()


class _Checked(httpx.AsyncBaseTransport):
    """A transport that keeps no connection alive: two names of one address would share it, and only one was
    authenticated."""

    def __init__(self, rules: WebhookRules) -> None:
        self._rules = rules
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, host = request.url, request.url.host
        try:
            resolved = await asyncio.get_running_loop().getaddrinfo(
                host, url.port or (443 if url.scheme == "https" else 80), type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        addresses = self._rules.usable(host, dict.fromkeys(str(address[0]) for *_, address in resolved))
        failed = httpx.ConnectError(refused(host), request=request)
        for address in addresses:
            request.url = url.copy_with(host=address)  # the header Host has the name
            request.extensions = {**request.extensions, "sni_hostname": host}
            try:
                return await self._inner.handle_async_request(request)
            except httpx.ConnectError as error:
                failed = error
        raise failed

    async def aclose(self) -> None:
        await self._inner.aclose()


def is_installed() -> bool:
    return importlib.util.find_spec("apprise") is not None


class Notifier:
    """Sends one event to a mail account or a chat, through apprise (`pip install 'shoal[apprise]'`). Close it.

    The URL is a secret: neither it nor what apprise logs about it leaves this class. apprise is imported with the first
    message; its calls block, and run on threads of their own.
    """

    def __init__(self, answer_s: float, waits: WaitTallies) -> None:
        """`answer_s`: seconds for a whole attempt."""
        self._answer_s, self._waits = answer_s, waits
        waits.expect("webhook", answer_s)
        self._threads = Threads(_APPRISE_THREADS, "apprise")

    async def send(self, url: str, event: EventView, job: JobFacts) -> str:
        """Send the message. Return why it was not sent, without the URL; empty if it was."""
        if not is_installed():
            return f"was not called: {MISSING}"
        title = f"{job.name}: {event.type}"
        text = f"{event.message}\n\njob {job.id} ({job.name}), project {job.project}, user {job.user}; event "
        text += message_id(job.id, event.seq)
        try:
            async with self._waits.bounded("webhook", self._answer_s):
                return await self._threads(_send, url, title, text, _TYPES.get(event.severity, "info"))
        except TimeoutError:
            return f"has not answered within {self._answer_s:g} s"

    def close(self) -> None:
        self._threads.close()


def _send(url: str, title: str, text: str, type_: str) -> str:
    from apprise import Apprise

    for name in ("apprise", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # their lines have parts of the URL
    try:
        receiver = Apprise()
        if not receiver.add(url):
            return "was not called: the secret is not a URL that apprise knows"
        return "" if receiver.notify(body=text, title=title, notify_type=type_) else "has not accepted it"
    except Exception as error:  # of more than a hundred plug-ins; the message may have the URL in it
        return f"has failed in apprise ({type(error).__name__})"
