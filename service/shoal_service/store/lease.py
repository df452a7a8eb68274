"""The lease on the jobs: one row with an owner, an expiry and an epoch that rises with every change of owner.

The epoch is a fencing token (Kleppmann 2016): every write of the control loop locks the lease's row until it commits,
so an owner that was suspended and resumes after it was replaced cannot write one more row. `now` comes from the
control planes: their clocks must differ by much less than the time to live.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, case, or_, select, update

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


def release(connection: Connection, owner: str) -> None:
    """The next owner can acquire the lease without waiting; does nothing if `owner` does not hold it."""
    connection.execute(update(lease).where(lease.c.num == 1, lease.c.owner == owner).values(owner="", expires_at=0.0))


def current(connection: Connection) -> Lease | None:
    """The current lease, expired or not; None: it was never acquired, or was released."""
    row = connection.execute(select(lease.c.owner, lease.c.epoch, lease.c.expires_at)).one()
    return Lease(row.owner, row.epoch, row.expires_at) if row.owner else None


def hold(connection: Connection, epoch: int) -> None:
    """Locks the lease until this transaction ends. Raises LeaseLost: the lease has another epoch."""
    row = connection.execute(select(lease.c.epoch, lease.c.owner).with_for_update(read=True)).one()
    if row.epoch != epoch:
        raise LeaseLost(epoch, row.epoch, row.owner)
