"""Stores the lease on the jobs: one row with owner, expiry and epoch.

The epoch rises with every change of owner. It is a fencing token (Kleppmann 2016): `Store.write(epoch)` locks the row
of the lease until the commit, so an owner that was suspended and resumes after it was replaced cannot write any row.
`now` comes from the control planes; `control/ownership.py` keeps them from trusting clocks that differ or were set.
With PostgreSQL the owner also holds a lock as long as its connection lasts, so that the end of its process is noticed
before the lease expires.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import case, or_, select, update

from shoal_service.store.database import Transaction, lease
from shoal_service.store.errors import LeaseLost


@dataclass(frozen=True, slots=True)
class Lease:
    owner: str
    epoch: int
    expires_at: float


def acquire(tx: Transaction, owner: str, *, ttl_s: float, now: float) -> Lease | None:
    """Acquire or renew the lease. None while another owner holds it."""
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
    epoch = tx.execute(statement).scalar_one_or_none()
    return None if epoch is None else Lease(owner, epoch, expires_at)


def note_presence(tx: Transaction, owner: str) -> None:
    """Note that the owner holds its presence (`Database.hold_presence`), so that others can see its end."""
    differs = lease.c.session_owner != owner
    statement = update(lease).where(lease.c.num == 1, lease.c.owner == owner, differs)
    tx.execute(statement.values(session_owner=owner))


def read_present_owner(tx: Transaction) -> str:
    """Return the owner of the lease if it has held its presence; otherwise an empty text."""
    row = tx.execute(select(lease.c.owner, lease.c.session_owner)).one()
    return row.owner if row.owner == row.session_owner else ""


def release(tx: Transaction, owner: str) -> None:
    """Release the lease, so that the next owner need not wait. Does nothing if `owner` does not hold it."""
    tx.execute(update(lease).where(lease.c.num == 1, lease.c.owner == owner).values(owner="", expires_at=0.0))


def read(tx: Transaction) -> Lease | None:
    """Read the lease, expired or not; None if it was never acquired, or was released."""
    row = tx.execute(select(lease.c.owner, lease.c.epoch, lease.c.expires_at)).one()
    return Lease(row.owner, row.epoch, row.expires_at) if row.owner else None


def lock(tx: Transaction, epoch: int) -> None:
    """Lock the lease until this transaction ends. Raises LeaseLost if it has another epoch."""
    row = tx.execute(_LOCK).one()
    if row.epoch != epoch:
        raise LeaseLost(epoch, row.epoch, row.owner)


_LOCK = select(lease.c.epoch, lease.c.owner).with_for_update(read=True)
"""Built once, because every write of the control loop runs it."""
