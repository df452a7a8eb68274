"""WebhookDelivery: sends the events of jobs to the receivers of webhooks, at least once, and in order for each job.

    store (events, cursors)  ->  lanes with undelivered events  ->  one task per lane: POST, then the cursor moves
                                 a lane: one hook for one job       failed: the lane waits, the cursor stays

Run by `shoal serve`. Only the owner of the lease delivers, and each write of a cursor is guarded by the lease's epoch.
After a crash, or a change of owner, events after the stored cursor are sent again, with the same ids.

This module decides which lanes have a task; `lane.py` delivers one of them, `slots.py` keeps receivers apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from shoal_service.clock import Clock
from shoal_service.control.webhooks.lane import LaneDelivery, NotOwner, WebhookConfig
from shoal_service.control.webhooks.threads import Threads
from shoal_service.store import webhook_lanes
from shoal_service.store.errors import LeaseLost, StoreUnavailable
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store
from shoal_service.store.webhook_lanes import Lane
from shoal_service.telemetry.webhook_tallies import WebhookTallies

_log = logging.getLogger(__name__)
_POLL_S = 2.0
"""Other control planes write events too, and this process is not notified of them."""
_MIN_PASS_S = 0.1
_CLOCKS_APART_S = 60.0
"""Largest difference between the clocks of two control planes, and longest transaction."""
_READ_ALL_S = 600.0
"""All jobs are read so often, in case the clocks are further apart."""
_THREADS = 2
_Key = tuple[str, str]


class WebhookDelivery:
    """`run` returns after `stop` is set, once: it closes the connections."""

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
        self._threads = Threads(_THREADS)
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
        """Lanes that have failed."""
        self._passed: dict[_Key, int] = {}
        """Number of the last event that this process has looked at, if it is after the stored cursor."""
        self._woken = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver while this process owns the lease."""
        loop = asyncio.get_running_loop()
        try:
            with self._store.subscribe(lambda _: loop.call_soon_threadsafe(self._woken.set)):
                while not stop.is_set():
                    self._woken.clear()
                    try:
                        await self._pass()
                    except LeaseLost as error:
                        self._lost_epoch = error.epoch
                        _log.warning("webhooks.lease_lost", extra={"error": str(error)})
                        await self._drop()
                    except StoreUnavailable as error:
                        _log.warning("webhooks.pass_failed", extra={"error": str(error)})
                        await self._drop()
                    except Exception:
                        _log.exception("webhooks.pass_failed")
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
        lanes = await self._threads(self._store.reading(webhook_lanes.backlog), since)
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
        """All events of a lane, or up to the first failure."""
        passed = self._passed.get(lane.key)
        try:
            end = await self._delivery.deliver(lane, passed, epoch)
        except NotOwner:
            return
        except LeaseLost as error:
            self._lost_epoch = epoch
            _log.warning("webhooks.lease_lost", extra={"error": str(error)})
            return
        except StoreUnavailable as error:
            _log.warning("webhooks.lane_interrupted", extra={"job": lane.job_id, "error": str(error)})
            end = self._later(lane)
        except Exception:
            _log.exception("webhooks.lane_failed", extra={"job": lane.job_id, "hook": lane.hook})
            end = self._later(lane)
        if self._epoch != epoch:
            return
        if isinstance(end, Lane):
            self._waiting[lane.key] = end
        else:
            self._passed[lane.key] = end

    def _later(self, lane: Lane) -> Lane:
        """The lane after a failure that is not the receiver's."""
        next_at = self._clock.time() + self._config.retries.first_s
        return replace(lane, retries=replace(lane.retries, next_at=next_at))

    def _owns(self, epoch: int) -> bool:
        """Whether this process still has the lease, by its own clock."""
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, stop: asyncio.Event) -> None:
        """Until something has changed or an attempt is due, and for a moment at least."""
        await self._any(stop, timeout_s=_MIN_PASS_S)
        now = self._clock.time()
        due_s = [max(0.0, (lane.retries.next_at or now) - now) for lane in self._waiting.values()]
        await self._any(stop, self._woken, timeout_s=min([_POLL_S, *due_s]))

    async def _any(self, *events: asyncio.Event, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await self._clock.wait_for(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED), timeout_s)
        except TimeoutError:
            pass
        finally:
            for wait in waits:
                wait.cancel()
