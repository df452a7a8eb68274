"""The clusters that have joined with a gateway, as the control plane sees them.

The control plane never speaks to a gateway: everything goes through the store, so each control plane has the same view
and a takeover loses nothing.

    JoinedClusters   has a JoinedCluster for each row of the store's table of clusters, made when the row appears and
                     closed when it is removed; the cluster with the service's own name exists from the start
    JoinedCluster    a cluster that has joined:
      a verb         writes an order to the store; its future gets the answer (`clusters/verbs.py`)
      snapshot       that of the newest report, unless the gateway has not reported for STALE_S
      a thread       reads reports and answers: when this process has stored one, and also from time to time, since the
                     gateway may have dialled another control plane

The control loop and its drivers call them, on the loop and on threads. An order has the epoch of the lease and is
written under it, so a control plane that has lost the lease orders nothing; its orders that no gateway has taken are
void. If the caller stops waiting, its order is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterUnreachable, OrderUnanswered, RayCallFailed
from shoal_service.clusters.verbs import BY_METHOD, VERBS, Verb
from shoal_service.clusters.wire import Answer, ClusterSnapshot
from shoal_service.control.protocols import ClusterMembership
from shoal_service.store import ClusterNotFound, Lease, Store, StoreUnavailable, Topic, cluster_links
from shoal_service.telemetry.tallies import WaitTallies
from shoal_workers.contract import Frozen
from shoal_workers.contract.plain_text import first_problem

STALE_S = 5.0
"""Seconds without a report after which a gateway counts as unreachable."""
_REREAD_S = 0.25
"""Seconds between two readings while a call waits: another control plane may have stored the answer."""
_REREAD_IDLE_S = 1.0
_CLEAN_S = 10.0
"""Seconds between two deletions of answered orders."""
_KEPT_S = 60.0
"""Age in seconds from which answered orders are deleted."""
_SNAPSHOT: TypeAdapter[ClusterSnapshot] = TypeAdapter(ClusterSnapshot)
_log = logging.getLogger(__name__)


class JoinedClusters:
    """Clusters that have joined; implements `protocols.Clusters`.

    Call `close` at the end. Everything but `refresh` may be called from any thread.
    """

    def __init__(
        self,
        store: Store,
        own: str,
        clock: Clock,
        lease: Callable[[], Lease | None],
        waits: WaitTallies | None = None,
    ) -> None:
        """`lease`: returns the lease of this process, None while it has none. Called from any thread."""
        self._store = store
        self.own = own
        """Name of the cluster of this service itself."""
        self._waits = waits or WaitTallies()
        for verb in VERBS.values():
            self._waits.expect(verb.kind, verb.limit_s)
        self._clock = clock
        self._lease = lease
        self._lock = threading.Lock()
        self._started: dict[str, JoinedCluster] = {}
        self._watchers: list[Callable[[str], None]] = []
        self.joined: Mapping[str, ClusterMembership] = {}
        """The clusters that have joined, the service's own first. Replaced as a whole. Read only."""
        self._is_closed = False
        self._replace({own: ClusterMembership(cluster=self._start(own))})

    def refresh(self) -> None:
        entries = self._store.reading(cluster_links.list_clusters)()
        with self._lock:
            if self._is_closed:
                return
        joined = {self.own: ClusterMembership(cluster=self._start(self.own))}
        for entry in entries:
            cluster = self._start(entry.name)
            joined[entry.name] = ClusterMembership(cluster=cluster, labels=entry.labels, cordon=entry.cordon)
        self._replace(joined)

    def of(self, name: str) -> JoinedCluster:
        name = name or self.own
        with self._lock:
            return self._started.get(name) or self._make(name)  # one that is not started answers no call

    def watch(self, changed: Callable[[str], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def close(self) -> None:
        """Close all clusters. Calls that wait fail."""
        with self._lock:
            self._is_closed = True
            started, self._started = [*self._started.values()], {}
        for cluster in started:
            cluster.close()

    def _start(self, name: str) -> JoinedCluster:
        """Return the cluster of this name, started if it was not."""
        with self._lock:
            if name not in self._started:
                cluster = self._make(name)
                cluster.watch(lambda: self._announce(name))
                self._started[name] = cluster.start()
            return self._started[name]

    def _make(self, name: str) -> JoinedCluster:
        return JoinedCluster(self._store, name, self._clock, self._lease, self._waits)

    def _replace(self, joined: Mapping[str, ClusterMembership]) -> None:
        """Set what has joined, and close the clusters that are no longer among it."""
        with self._lock:
            gone = [self._started.pop(name) for name in [*self._started] if name not in joined]
            self.joined = joined
        for cluster in gone:
            cluster.close()

    def _announce(self, name: str) -> None:
        for changed in tuple(self._watchers):
            changed(name)


@dataclass(frozen=True, slots=True)
class _Report:
    """The newest report that this process has read. Number -1 if it has read none."""

    life: str = ""
    number: int = -1
    seen_mono: float = float("-inf")
    address: str = ""
    error: str = ""
    snapshot: ClusterSnapshot | None = None
    snapshot_report: int = -1


@dataclass(frozen=True, slots=True)
class _PendingOrder:
    verb: Verb
    answer: Future[Any]


class JoinedCluster:
    """A cluster that has joined; implements `protocols.Cluster`.

    Call `start` first, and `close` at the end. Without `start`, every call raises ClusterUnreachable.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        clock: Clock,
        lease: Callable[[], Lease | None],
        waits: WaitTallies | None = None,
    ) -> None:
        """`lease`: returns the lease of this process, None while it has none. Called from any thread."""
        self._store = store
        self.name = name
        self._waits = waits or WaitTallies()
        self._clock = clock
        self._lease = lease
        self._epoch: int | None = None
        """Epoch of the newest lease of this process."""
        self._newest = _Report()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._is_closed = False
        self._pending: dict[int, _PendingOrder] = {}
        self._abandoned: set[int] = set()
        """Numbers of orders whose answers nothing waits for any more."""
        self._watchers: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._poll_store, daemon=True, name=f"cluster {name}")

    def start(self) -> JoinedCluster:
        self._thread.start()
        return self

    def close(self) -> None:
        """Close the cluster. Calls that wait fail."""
        with self._lock:
            self._is_closed = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def address(self) -> str:
        """Address of the Ray cluster, from its gateway; empty if none has reported."""
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

    def snapshot(self) -> ClusterSnapshot:
        newest = self._newest
        if reason := self._why_unreachable(newest):
            raise ClusterUnreachable(reason)
        assert newest.snapshot is not None
        return newest.snapshot

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def __getattr__(self, name: str) -> Any:
        """Return any other method of `protocols.Cluster`: a coroutine function that orders the verb of this name.

        The method returns the answer. It raises what the call raises in the cluster, and ClusterUnreachable.
        """
        verb = BY_METHOD.get(name)
        if verb is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(self._order, verb)

    async def _order(self, verb: Verb, *arguments: Any, **named: Any) -> Any:
        """Order a verb and wait for the answer. If the caller is cancelled, so is the order."""
        number, answer = await asyncio.to_thread(self._write, verb, verb.make_request(*arguments, **named))
        try:
            async with self._waits.bounded(verb.kind, verb.limit_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise OrderUnanswered(f"{verb.kind}: the gateway has not answered within {verb.limit_s:g} s") from None
        finally:
            self._stop_waiting(number)

    def _write(self, verb: Verb, request: Frozen) -> tuple[int, Future[Any]]:
        """Write an order. Blocks on the store. Raises ClusterUnreachable, LeaseLost."""
        if reason := self._why_unreachable(self._newest):
            raise ClusterUnreachable(reason)
        epoch = self._order_epoch()
        if epoch is None:
            raise ClusterUnreachable("this control plane has never had the lease on the jobs, so it orders nothing")
        arguments = to_json(request.model_dump(), inf_nan_mode="constants", serialize_unknown=True).decode()
        archive = getattr(request, "sha256", None)  # the gateway may read this archive while the order stands
        write = self._store.writing(cluster_links.write_order, epoch)
        try:
            number = write(self.name, verb.kind, arguments, archive=archive, now=self._clock.time())
        except ClusterNotFound as error:
            raise ClusterUnreachable(str(error)) from error
        answer = Future[Any]()
        with self._lock:
            if self._is_closed:
                raise ClusterUnreachable("the server stops")
            self._pending[number] = _PendingOrder(verb, answer)
        self._woken.set()  # the answer may have been stored already
        return number, answer

    def _order_epoch(self) -> int | None:
        """Return the epoch under which orders are written; None if this process never had the lease."""
        # A server that stops drops its lease before it ends its drivers. They still order under the last epoch, and
        # the store refuses that if another control plane has the lease.
        if (lease := self._lease()) is not None:
            self._epoch = lease.epoch
        return self._epoch

    def _stop_waiting(self, number: int) -> None:
        """Note that nothing waits for an order any more: it was answered, or its caller was cancelled."""
        with self._lock:
            if self._pending.pop(number, None) is not None:
                self._abandoned.add(number)
                self._woken.set()

    def _why_unreachable(self, newest: _Report) -> str:
        """Return why the cluster cannot be reached; empty if the gateway reports and Ray answers it."""
        silent_s = self._clock.monotonic() - newest.seen_mono
        if not newest.life and (silent_s <= STALE_S or newest.number <= 0):
            return f"no gateway speaks for the cluster {self.name!r}"
        if silent_s > STALE_S:
            duration = f"{silent_s:.0f} s" if silent_s < 1e9 else "as long as this server runs"
            return f"the gateway of the cluster {self.name!r} has been silent for {duration}"
        if newest.error:
            return newest.error
        return "" if newest.snapshot is not None else "the gateway has not looked at its cluster yet"

    # --- on the thread of the cluster

    def _poll_store(self) -> None:
        cleaned_mono = self._clock.monotonic()
        with self._store.subscribe(lambda _: self._woken.set(), Topic.REPORTS.narrow_to(self.name)):
            while True:
                self._woken.wait(_REREAD_S if self._pending else _REREAD_IDLE_S)
                self._woken.clear()
                if self._is_closed:
                    break
                try:
                    self._read_report()
                    self._read_answers()
                    self._cancel_abandoned()
                    if self._clock.monotonic() - cleaned_mono > _CLEAN_S:
                        cleaned_mono = self._clock.monotonic()
                        self._delete_answered()
                except StoreUnavailable as error:
                    _log.warning("cluster.store_unavailable", extra={"error": str(error)})
                except Exception:
                    _log.exception("cluster.read_failed")  # the thread must go on, or calls would wait for ever
        self._fail_all("the server stops")

    def _read_report(self) -> None:
        last = self._newest
        if self._store.reading(cluster_links.read_newest_report)(self.name) == (last.life, last.number):
            if self._why_unreachable(last):
                self._fail_all(self._why_unreachable(last))
            return
        row = self._store.reading(cluster_links.find)(self.name)
        if row is None:
            return
        snapshot = last.snapshot
        if (row.life, row.snapshot_report) != (last.life, last.snapshot_report):
            try:
                snapshot = _SNAPSHOT.validate_json(row.snapshot) if row.snapshot else None
            except ValidationError as error:
                _log.warning("cluster.snapshot_refused", extra={"error": first_problem(error)})
                snapshot = None
        # The first report may have been stored long before this process ran, so the cluster counts as reachable only
        # once the second one comes.
        seen_mono = self._clock.monotonic() if last.number >= 0 else last.seen_mono
        self._newest = newest = _Report(
            row.life, row.report, seen_mono, row.address, row.error, snapshot, row.snapshot_report
        )
        if reason := self._why_unreachable(newest):
            self._fail_all(reason)
        if _announced_part(last.snapshot) != _announced_part(snapshot) or last.error != row.error:
            for changed in tuple(self._watchers):
                changed()

    def _read_answers(self) -> None:
        with self._lock:
            pending = dict(self._pending)
        if not pending:
            return
        answers = self._store.reading(cluster_links.read_answers)(self.name, pending.keys())
        for number, order in pending.items():
            text = answers.get(number, "")
            if text is None:
                continue  # not answered yet
            with self._lock:
                self._pending.pop(number, None)
            _settle(order.answer, _read_outcome(order.verb, text))

    def _cancel_abandoned(self) -> None:
        with self._lock:
            abandoned, self._abandoned = self._abandoned, set()
        if abandoned:
            self._store.writing(cluster_links.cancel_orders)(self.name, abandoned)

    def _delete_answered(self) -> None:
        if self._lease() is not None and (epoch := self._order_epoch()) is not None:
            before = self._clock.time() - _KEPT_S
            self._store.writing(cluster_links.remove_old_orders, epoch)(self.name, before=before)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            self._abandoned.update(pending)
        for order in pending.values():
            _settle(order.answer, ClusterUnreachable(reason))


def _announced_part(snapshot: ClusterSnapshot | None) -> object:
    """Return the part of a snapshot whose changes are announced to watchers."""
    return None if snapshot is None else (snapshot.nodes, snapshot.failed)


def _read_outcome(verb: Verb, text: str) -> Any:
    """Read what the call of a verb returns, or the exception that it raises. `text`: empty if the order is gone."""
    if not text:
        return ClusterUnreachable("the order was deleted before it was answered")
    try:
        answer = Answer.model_validate_json(text)
        return verb.answer.validate_json(answer.value) if answer.failure is None else answer.failure.error()
    except ValidationError as error:
        _log.warning("cluster.answer_refused", extra={"kind": verb.kind, "error": first_problem(error)})
        return RayCallFailed(f"the answer of the gateway is not valid: {first_problem(error)}")


def _settle(future: Future[Any], outcome: Any) -> None:
    """Settle a future with a value or an exception, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
