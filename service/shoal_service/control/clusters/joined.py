"""JoinedCluster: a cluster that has joined with a gateway, as the control plane sees it.

    a call        writes an order to the store; its future is settled with the answer
    snapshot      that of the newest report, unless the gateway has been silent for STALE_S
    one thread    reads reports and answers: when this process has stored one, and at the latest after a moment, since
                  the gateway may have dialled another control plane

Made by `shoal serve`, called by the control loop and its drivers, on the loop and on threads. Every answer is validated
by `clusters/calls.py`. An order has the epoch of the lease and is written under it, so a control plane that has lost
the lease orders nothing; its orders that no gateway has taken are void. An order that is no longer waited for is
deleted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterUnreachable, RayCallFailed
from shoal_service.clusters import calls
from shoal_service.clusters.snapshot import ClusterSnapshot, FoundSupervisor, RoomKind, UnusedPackages
from shoal_service.clusters.wire import Answer
from shoal_service.core.nodes import Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.store import cluster_links
from shoal_service.store.cluster_links import reports_of
from shoal_service.store.errors import ClusterNotFound, StoreUnavailable
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract.base import Frozen

STALE_S = 5.0
"""A gateway that has reported nothing for this long is away."""
_REREAD_S = 0.25
"""Between two readings while a call waits: another control plane may have stored the answer."""
_REREAD_IDLE_S = 1.0
_FRESH_S = 1.0
_LIMIT_S = 60.0
_LIMITS_S: Mapping[type[Frozen], float] = {
    calls.FaultOfNode: 600.0,
    calls.ListUnusedPackages: 180.0,
    calls.RemovePackages: 180.0,
    calls.UploadCode: 180.0,
    calls.SeesStorage: 30.0,
}
_CLEAN_S = 10.0
_KEPT_S = 60.0
"""Answered orders are deleted after this time."""
_SNAPSHOT: TypeAdapter[ClusterSnapshot] = TypeAdapter(ClusterSnapshot)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest report, as this process has seen it."""

    life: str = ""
    number: int = -1
    seen_mono: float = float("-inf")
    address: str = ""
    error: str = ""
    snapshot: ClusterSnapshot | None = None
    snapshot_report: int = -1


@dataclass(frozen=True, slots=True)
class _Waiting:
    kind: type[Frozen]
    answer: Future[Any]


class JoinedCluster:
    """A `protocols.Cluster`. Call `start` first, and `close` at the end. One that was not started answers no call."""

    def __init__(self, store: Store, name: str, clock: Clock, lease: Callable[[], Lease | None]) -> None:
        """`lease`: the one of this process, None while it has none. From any thread."""
        self._store = store
        self.name = name
        self._clock = clock
        self._lease = lease
        self._epoch: int | None = None
        """Epoch of the newest lease of this process."""
        self._newest = _Newest()
        self._lock = threading.Condition()
        self._is_woken = self._is_closed = False
        self._pending: dict[int, _Waiting] = {}
        self._unwanted: set[int] = set()
        """Orders whose answers this process no longer waits for."""
        self._watchers: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True, name=f"cluster {name}")

    def start(self) -> JoinedCluster:
        self._thread.start()
        return self

    def close(self) -> None:
        """Calls that wait fail."""
        with self._lock:
            self._is_closed = self._is_woken = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> JoinedCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Address of the Ray cluster, as its gateway knows it; empty: no gateway has reported."""
        return self._newest.address

    @property
    def connected(self) -> bool:
        return not self._why_unreachable(self._newest)

    @property
    def silent_s(self) -> float | None:
        newest = self._newest
        if newest.number <= 0 or newest.seen_mono == float("-inf"):
            return None
        return max(0.0, self._clock.monotonic() - newest.seen_mono)

    def snapshot(self, *, fresh: bool = False) -> ClusterSnapshot:
        if fresh and self.connected and self._own_epoch() is not None:
            with suppress(ClusterUnreachable):  # then what was reported last counts
                self._block(calls.LookNow(), within_s=_FRESH_S)
        newest = self._newest
        if reason := self._why_unreachable(newest):
            raise ClusterUnreachable(reason)
        assert newest.snapshot is not None
        return newest.snapshot

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        self._block(calls.StartSupervisor(config=config, avoid_nodes=avoid_nodes, places=dict(places)))

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        self._block(calls.KeepReady(avoid_nodes=avoid_nodes))

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None:
        found: FoundSupervisor | None = self._block(calls.FindSupervisor(job_id=job_id, attempt=attempt))
        return found

    def why_gone(self, job_id: str, attempt: int) -> str:
        return str(self._block(calls.WhyGone(job_id=job_id, attempt=attempt)))

    def silent_supervisor(self, job_id: str, attempt: int) -> str:
        return str(self._block(calls.SilentSupervisor(job_id=job_id, attempt=attempt)))

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool:
        request = calls.ReplaceSupervisor(job_id=job_id, attempt=attempt, silent_node=silent_node, home=home)
        return bool(self._block(request))

    def unrecorded_starts(self, job_id: str, attempt: int) -> int:
        return int(self._block(calls.UnrecordedStarts(job_id=job_id, attempt=attempt)))

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        found: tuple[ProcessEnd, ...] = self._block(calls.LastEnds(job_id=job_id, attempt=attempt))
        return found

    def reap(self, job_id: str, attempt: int) -> int:
        return int(self._block(calls.Reap(job_id=job_id, attempt=attempt)))

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        return str(await self.ask(calls.FaultOfNode(suspect=suspect, partner=partner)))

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        found: tuple[UnusedPackages, ...] = await self.ask(calls.ListUnusedPackages(for_s=for_s))
        return found

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        return bool(await self.ask(calls.RemovePackages(node_id=node_id, name=name, for_s=for_s)))

    def request_room(self, workers: Mapping[RoomKind, int]) -> None:
        self._block(calls.RequestRoom(workers=tuple(workers.items())))

    def upload_code(self, job_id: str, attempt: int, sha256: str) -> str:
        request = calls.UploadCode(job_id=job_id, attempt=attempt, sha256=sha256)
        return str(self._block(request, archive=sha256))

    def sees_storage(self, url: str, name: str) -> str:
        return str(self._block(calls.SeesStorage(url=url, name=name)))

    async def ask(self, request: Frozen) -> Any:
        """The answer to an order. If the caller is cancelled, so is the order. Raises what the call raises in the
        cluster; ClusterUnreachable."""
        number, answer = await asyncio.to_thread(self._write, request)
        limit_s = _LIMITS_S.get(type(request), _LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise _late(request, limit_s) from None
        finally:
            self._leave(number)

    def _block(self, request: Frozen, *, archive: str | None = None, within_s: float | None = None) -> Any:
        limit_s = within_s or _LIMITS_S.get(type(request), _LIMIT_S)
        number, answer = self._write(request, archive)
        try:
            return answer.result(limit_s)
        except TimeoutError:
            raise _late(request, limit_s) from None
        finally:
            self._leave(number)

    def _write(self, request: Frozen, archive: str | None = None) -> tuple[int, Future[Any]]:
        """Blocks on the store. Raises ClusterUnreachable, LeaseLost."""
        if reason := self._why_unreachable(self._newest):
            raise ClusterUnreachable(reason)
        epoch = self._own_epoch()
        if epoch is None:
            raise ClusterUnreachable("this control plane has never had the lease on the jobs, so it orders nothing")
        kind, now = type(request), self._clock.time()
        arguments = to_json(request.model_dump(), inf_nan_mode="constants", serialize_unknown=True).decode()
        try:
            with self._store.write(epoch) as tx:
                number = cluster_links.write_order(tx, self.name, kind.__name__, arguments, archive=archive, now=now)
        except ClusterNotFound as error:
            raise ClusterUnreachable(str(error)) from error
        answer = Future[Any]()
        with self._lock:
            if self._is_closed:
                raise ClusterUnreachable("the server stops")
            self._pending[number] = _Waiting(kind, answer)
            self._is_woken = True  # the answer may have been stored already
            self._lock.notify_all()
        return number, answer

    def _own_epoch(self) -> int | None:
        """A server that stops ends its drivers after it has dropped its lease; the store fences what they order."""
        if (lease := self._lease()) is not None:
            self._epoch = lease.epoch
        return self._epoch

    def _leave(self, number: int) -> None:
        """Its caller waits no more: for an answer, or since it has it."""
        with self._lock:
            if self._pending.pop(number, None) is not None:
                self._unwanted.add(number)
                self._is_woken = True
                self._lock.notify_all()

    def _why_unreachable(self, newest: _Newest) -> str:
        """Empty: the gateway reports, and Ray answers it."""
        silent_s = self._clock.monotonic() - newest.seen_mono
        if silent_s > STALE_S:
            if not newest.life and newest.number <= 0:
                return f"no gateway speaks for the cluster {self.name!r}"
            shown = f"{silent_s:.0f} s" if silent_s < 1e9 else "as long as this server runs"
            return f"the gateway of the cluster {self.name!r} has been silent for {shown}"
        if not newest.life:
            return f"no gateway speaks for the cluster {self.name!r}"
        if newest.error:
            return newest.error
        return "" if newest.snapshot is not None else "the gateway has not looked at its cluster yet"

    # --- the thread

    def _watch(self) -> None:
        cleaned_mono = self._clock.monotonic()
        with self._store.subscribe(self._wake, reports_of(self.name)):
            while True:
                with self._lock:
                    if not self._is_woken:
                        self._lock.wait(_REREAD_S if self._pending else _REREAD_IDLE_S)
                    self._is_woken = False
                    if self._is_closed:
                        break
                try:
                    self._read_report()
                    self._read_answers()
                    self._cancel()
                    if self._clock.monotonic() - cleaned_mono > _CLEAN_S:
                        cleaned_mono = self._clock.monotonic()
                        self._clean()
                except StoreUnavailable as error:
                    _log.warning("cluster.store_unavailable", extra={"error": str(error)})
                except Exception:
                    _log.exception("cluster.read_failed")  # whatever it was, calls must not wait for ever
        self._fail_all("the server stops")

    def _wake(self, _: str) -> None:
        with self._lock:
            self._is_woken = True
            self._lock.notify_all()

    def _read_report(self) -> None:
        known = self._newest
        if self._store.reading(cluster_links.newest_report)(self.name) == (known.life, known.number):
            if self._why_unreachable(known):
                self._fail_all(self._why_unreachable(known))
            return
        with self._store.read() as tx:
            row = cluster_links.find(tx, self.name)
        if row is None:
            return
        snapshot = known.snapshot
        if (row.life, row.snapshot_report) != (known.life, known.snapshot_report):
            try:
                snapshot = _SNAPSHOT.validate_json(row.snapshot) if row.snapshot else None
            except ValidationError as error:
                _log.warning("cluster.snapshot_refused", extra={"error": _words(error)})
                snapshot = None
        # What is read first was reported before this process ran, maybe long ago: it counts once the next one comes.
        seen_mono = self._clock.monotonic() if known.number >= 0 else known.seen_mono
        self._newest = newest = _Newest(
            row.life, row.report, seen_mono, row.address, row.error, snapshot, row.snapshot_report
        )
        if reason := self._why_unreachable(newest):
            self._fail_all(reason)
        if _watched(known.snapshot) != _watched(snapshot) or known.error != row.error:
            for changed in tuple(self._watchers):
                changed()

    def _read_answers(self) -> None:
        with self._lock:
            pending = dict(self._pending)
        if not pending:
            return
        with self._store.read() as tx:
            found = cluster_links.answers_of(tx, self.name, pending.keys())
        for number, waiting in pending.items():
            text = found.get(number, "")
            if text is None:
                continue
            with self._lock:
                self._pending.pop(number, None)
            if not text:
                _settle(waiting.answer, error=ClusterUnreachable("the order was deleted before it was answered"))
                continue
            try:
                _settle_with(waiting, Answer.model_validate_json(text))
            except ValidationError as error:
                _log.warning("cluster.answer_refused", extra={"kind": waiting.kind.__name__, "error": _words(error)})
                failed = RayCallFailed(f"the answer of the gateway is not valid: {_words(error)}")
                _settle(waiting.answer, error=failed)

    def _cancel(self) -> None:
        with self._lock:
            unwanted, self._unwanted = self._unwanted, set()
        if unwanted:
            with self._store.write() as tx:
                cluster_links.cancel_orders(tx, self.name, unwanted)

    def _clean(self) -> None:
        if self._lease() is not None and (epoch := self._own_epoch()) is not None:
            with self._store.write(epoch) as tx:
                cluster_links.remove_old_orders(tx, self.name, before=self._clock.time() - _KEPT_S)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            self._unwanted.update(pending)
        for waiting in pending.values():
            _settle(waiting.answer, error=ClusterUnreachable(reason))


def _watched(snapshot: ClusterSnapshot | None) -> object:
    """A change of this is announced to watchers."""
    return None if snapshot is None else (snapshot.nodes, snapshot.failed)


def _settle_with(waiting: _Waiting, answer: Answer) -> None:
    """Raises ValidationError: it is not an answer to that call."""
    if answer.failure is not None:
        _settle(waiting.answer, error=answer.failure.error())
    else:
        _settle(waiting.answer, value=calls.ANSWERS[waiting.kind].validate_json(answer.value))


def _settle(answer: Future[Any], *, value: Any = None, error: Exception | None = None) -> None:
    """A future that was cancelled by its waiter stays so."""
    if answer.set_running_or_notify_cancel():
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)


def _late(request: Frozen, limit_s: float) -> ClusterUnreachable:
    return ClusterUnreachable(f"{type(request).__name__}: the gateway has not answered within {limit_s:g} s")


def _words(error: ValidationError) -> str:
    return str(error.errors(include_url=False, include_input=False)[0])[: calls.MAX_WORDS]
