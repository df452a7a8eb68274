"""The lease on the jobs: one row with an owner, an expiry and an epoch that rises with every change of owner.

The epoch is a fencing token (Kleppmann 2016): every write of the control loop locks the lease's row until it commits,
so an owner that was suspended and resumes after it was replaced cannot write one more row. `now` comes from the
control planes; `control/ownership.py` keeps them from trusting clocks that differ or were set. With PostgreSQL the
owner also holds a lock as long as its connection lasts, so that the end of its process is noticed before the lease
expires.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, case, or_, select, update

from shoal_service.store.database import Database
from shoal_service.store.errors import LeaseLost
from shoal_service.store.tables import lease


@dataclass(frozen=True, slots=True)
class Lease:
    owner: str
    epoch: int
    expires_at: float


def acquire(connection: Connection, owner: str, *, ttl_s: float, now: float) -> Lease | None:
    """The lease, new or renewed; None while another owner holds it."""
    assert owner and ttl_s > 0
    expires_at = now + ttl_s
    statement = (
        update(lease)
        .where(lease.c.num == 1, or_(lease.c.owner == owner, lease.c.expires_at <= now))
        .values(
            owner=owner,
            expires_at=expires_at,
            epoch=case((lease.c.owner == owner, lease.c.epoch), else_=lease.c.epoch + 1),
        )
        .returning(lease.c.epoch)
    )
    epoch = connection.execute(statement).scalar_one_or_none()
    return None if epoch is None else Lease(owner, epoch, expires_at)


def announced(connection: Connection, owner: str) -> None:
    """The owner is announced (`Database.announce`), so others may take its silence for its end."""
    differs = lease.c.session_owner != owner
    statement = update(lease).where(lease.c.num == 1, lease.c.owner == owner, differs)
    connection.execute(statement.values(session_owner=owner))


def announced_owner(connection: Connection) -> str:
    """The owner of the lease, if it has been announced; else empty."""
    row = connection.execute(select(lease.c.owner, lease.c.session_owner)).one()
    return row.owner if row.owner == row.session_owner else ""


def release(connection: Connection, owner: str) -> None:
    """The next owner can acquire the lease without waiting; does nothing if `owner` does not hold it."""
    connection.execute(update(lease).where(lease.c.num == 1, lease.c.owner == owner).values(owner="", expires_at=0.0))


def current(connection: Connection) -> Lease | None:
    """The current lease, expired or not; None: it was never acquired, or was released."""
    row = connection.execute(select(lease.c.owner, lease.c.epoch, lease.c.expires_at)).one()
    return Lease(row.owner, row.epoch, row.expires_at) if row.owner else None


def hold(connection: Connection, epoch: int) -> None:
    """Locks the lease until this transaction ends. Raises LeaseLost: the lease has another epoch."""
    row = connection.execute(_HELD).one()
    if row.epoch != epoch:
        raise LeaseLost(epoch, row.epoch, row.owner)


_HELD = select(lease.c.epoch, lease.c.owner).with_for_update(read=True)
"""Built once: every write of the control loop runs it."""


class LeaseMethods:
    """A part of `Store`."""

    _database: Database

    def acquire_lease(self, owner: str, *, ttl_s: float, now: float) -> Lease | None:
        """The lease, new or renewed; None while another owner holds it."""
        with self._database.write() as tx:
            lease = acquire(tx, owner, ttl_s=ttl_s, now=now)
        if lease is not None and self._database.announce(owner):
            with self._database.write() as tx:
                announced(tx, owner)
        return lease

    def has_left(self, owner: str) -> bool:
        """The owner of the lease was announced in the database, and its connection has ended. False: not known."""
        with self._database.read() as tx:
            is_known = announced_owner(tx) == owner
        return is_known and not self._database.is_announced(owner)

    def release_lease(self, owner: str) -> None:
        with self._database.write() as tx:
            release(tx, owner)

    def current_lease(self) -> Lease | None:
        with self._database.read() as tx:
            return current(tx)
