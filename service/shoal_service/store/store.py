"""Opens transactions on the database of jobs. Thread-safe; synchronous.

    with store.write(epoch) as tx:      the control loop, under its lease
        driving.requeue(tx, job_id, ...)
    with store.write() as tx:           a change that a user asks for
    with store.read() as tx:

The other modules of this folder, one for each area, have the functions that run in a transaction; they take `tx` first.
Only `write` checks the lease, records the request of the API in the audit, and notifies the subscribers of this process
after the commit. Any number of processes may open the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
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
        """Open the database and migrate it. Raises StoreUnavailable."""
        database = Database(url)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        self._database.close()

    def read(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that reads.

        On SQLite it is a consistent view; on PostgreSQL each statement sees what was committed when it began.
        """
        return self._database.read()

    @contextmanager
    def write(self, epoch: int | None = None) -> Iterator[Transaction]:
        """Begin a transaction that is committed at the end of the block, or rolled back if the block raises.

        After the commit, the subscribers of this process are notified of what it has published. The first transaction
        of a request of the API also records the request in the audit.

        Args:
            epoch: epoch of the caller's lease. None if the change needs no lease: a user requests it, or it is fenced
                in another way.

        Raises:
            LeaseLost: the lease has another epoch. Nothing is written.
        """
        entry = access.CURRENT_ENTRY.get()
        with self._database.write(epoch) as tx:
            if epoch is not None:
                leases.lock(tx, epoch)
            yield tx
            if entry is not None and entry.is_recorded:
                entry = None
            if entry is not None:
                access.record(tx, entry)
        if entry is not None:
            entry.is_recorded = True  # not before the commit: if it fails, the answer of the request is recorded
        tx.publish_all(self._hub, self._database.tallies)

    def reading(self, function: Callable[Concatenate[Transaction, _P], _R]) -> Callable[_P, _R]:
        """Make the function a call within its own `read`: for another thread, and within an expression."""
        return _within(self._database.read, function)

    def writing(
        self, function: Callable[Concatenate[Transaction, _P], _R], epoch: int | None = None
    ) -> Callable[_P, _R]:
        """Make the function a call within its own `write`."""
        return _within(partial(self.write, epoch), function)

    def trying(self, function: Callable[Concatenate[Transaction, _P], _R]) -> Callable[_P, _R]:
        """Make the function a call that returns or raises what `writing` would, and stores nothing."""
        return _within(self._write_and_roll_back, function)

    @contextmanager
    def _write_and_roll_back(self) -> Iterator[Transaction]:
        with suppress(_RolledBack), self.write() as tx:
            yield tx
            raise _RolledBack

    def subscribe(self, listener: Listener, topic: str | None = None) -> Subscription:
        """Call the listener on the committing thread after each change; see Hub.subscribe."""
        return self._hub.subscribe(listener, topic)

    def ping(self) -> None:
        """Query the database. Raises StoreUnavailable if it does not answer."""
        with self._database.read() as tx:
            tx.execute(text("SELECT 1"))

    @property
    def tallies(self) -> DatabaseTallies:
        """Durations of this process's transactions, and what they have written."""
        return self._database.tallies

    def get_job(self, job_id: str) -> JobView:
        """Read a job. Raises JobNotFound."""
        with self._database.read() as tx:
            return load_view(tx, job_id)

    # --- the lease

    def acquire_lease(self, owner: str, *, ttl_s: float, now: float) -> Lease | None:
        """Acquire or renew the lease. None while another owner holds it."""
        with self._database.write() as tx:
            lease = leases.acquire(tx, owner, ttl_s=ttl_s, now=now)
        if lease is not None and self._database.hold_presence(owner):
            with self._database.write() as tx:
                leases.note_presence(tx, owner)
        return lease

    def is_owner_gone(self, owner: str) -> bool:
        """Return True if the lease's owner held its presence, and its connection to the database has ended.

        False also if that is unknown.
        """
        with self._database.read() as tx:
            was_present = leases.read_present_owner(tx) == owner
        return was_present and not self._database.is_present(owner)

    def release_lease(self, owner: str) -> None:
        with self._database.write() as tx:
            leases.release(tx, owner)

    def read_lease(self) -> Lease | None:
        with self._database.read() as tx:
            return leases.read(tx)


class _RolledBack(Exception):
    """Ends a transaction that was only tried."""


def _within(
    begin: Callable[[], AbstractContextManager[Transaction]], function: Callable[Concatenate[Transaction, _P], _R]
) -> Callable[_P, _R]:
    """Make a function of a transaction a call that begins one."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with begin() as tx:
            return function(tx, *args, **kwargs)

    return call
