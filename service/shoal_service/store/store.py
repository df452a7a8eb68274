"""`Store`: transactions on every job with its histories. Thread-safe; synchronous; any process may open the database.

    with store.write(epoch) as tx:      the control loop, under its lease
        driving.requeue(tx, job_id, ...)
    with store.write() as tx:           a change that a user asks for
    with store.read() as tx:

What can be done in a transaction stands in the other modules of this folder, one for each area, as functions that take
`tx` first. `write` is the one place that checks the lease, records the request of the API in the audit, and notifies
the subscribers of this process after the commit.

The methods of the lease are here since the check is; `get_job` is, because half of all callers want nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import text

from shoal_service.store import access
from shoal_service.store import lease as leases
from shoal_service.store.database import Database, DatabaseTallies, Transaction
from shoal_service.store.hub import Hub, Listener, Subscription
from shoal_service.store.lease import Lease
from shoal_service.store.migrate import migrate
from shoal_service.store.records import load_view
from shoal_service.views import JobView

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Store:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._hub = Hub()

    @classmethod
    def open(cls, url: str) -> Store:
        """Opens the database and migrates it. Raises StoreUnavailable."""
        database = Database(url)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Begins a transaction that reads: a consistent view on SQLite; on PostgreSQL each statement sees what was
        committed when it began."""
        with self._database.read() as tx:
            yield tx

    @contextmanager
    def write(self, epoch: int | None = None) -> Iterator[Transaction]:
        """Begins one transaction, committed at the end of the block and rolled back if it raises.

        Then the subscribers of this process are notified of what it has published. The first one of a request of the
        API also records the request in the audit.

        Args:
            epoch: of the caller's lease; None if no lease is needed, since a user asks for the change, or since the
                change is fenced in another way.

        Raises:
            LeaseLost: the lease has another epoch. Nothing is written.
        """
        deed = access.CURRENT.get()
        with self._database.write(epoch) as tx:
            if epoch is not None:
                leases.hold(tx, epoch)
            yield tx
            records = deed is not None and not deed.is_recorded
            if deed is not None and records:
                access.record(tx, deed)
        if deed is not None and records:
            deed.is_recorded = True  # not before the commit: if it fails, the answer of the request is recorded
        tx.committed(self._hub, self._database.tallies)

    def reading(self, function: Callable[Concatenate[Transaction, _P], _R]) -> Callable[_P, _R]:
        """Makes the function a call that opens a `read` of its own: for another thread, and within an expression."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._database.read() as tx:
                return function(tx, *args, **kwargs)

        return call

    def writing(
        self, function: Callable[Concatenate[Transaction, _P], _R], epoch: int | None = None
    ) -> Callable[_P, _R]:
        """Makes the function a call that opens a `write` of its own."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.write(epoch) as tx:
                return function(tx, *args, **kwargs)

        return call

    def trying(self, function: Callable[Concatenate[Transaction, _P], _R]) -> Callable[_P, _R]:
        """Makes the function a call that returns or raises what `writing` would, and stores nothing."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            answer: list[_R] = []
            try:
                with self.write() as tx:
                    answer.append(function(tx, *args, **kwargs))
                    raise _RolledBack
            except _RolledBack:
                return answer[0]

        return call

    def subscribe(self, listener: Listener, job_id: str | None = None) -> Subscription:
        """Subscribes to changes, see Hub.subscribe: `listener(job_id)` is called on the committing thread."""
        return self._hub.subscribe(listener, job_id)

    def ping(self) -> None:
        """Asks the database for an answer. Raises StoreUnavailable: it does not answer."""
        with self._database.read() as tx:
            tx.execute(text("SELECT 1"))

    @property
    def tallies(self) -> DatabaseTallies:
        """What this process's transactions have taken and written."""
        return self._database.tallies

    def get_job(self, job_id: str) -> JobView:
        """Reads a job. Raises JobNotFound."""
        with self._database.read() as tx:
            return load_view(tx, job_id)

    # --- the lease

    def acquire_lease(self, owner: str, *, ttl_s: float, now: float) -> Lease | None:
        """Acquires or renews the lease. None while another owner holds it."""
        with self._database.write() as tx:
            lease = leases.acquire(tx, owner, ttl_s=ttl_s, now=now)
        if lease is not None and self._database.announce(owner):
            with self._database.write() as tx:
                leases.announced(tx, owner)
        return lease

    def has_left(self, owner: str) -> bool:
        """Return whether the owner of the lease was announced in the database, and its connection has ended. False: not
        known."""
        with self._database.read() as tx:
            is_known = leases.announced_owner(tx) == owner
        return is_known and not self._database.is_announced(owner)

    def release_lease(self, owner: str) -> None:
        with self._database.write() as tx:
            leases.release(tx, owner)

    def current_lease(self) -> Lease | None:
        with self._database.read() as tx:
            return leases.current(tx)


class _RolledBack(Exception):
    """Ends a transaction that was only tried."""
