"""Who drives the jobs: one row with an owner, an expiry and an epoch that rises with every change of owner.

The epoch is a fencing token (Kleppmann 2016): every write of the control loop holds the lease's row while it commits,
so an owner that was frozen and wakes up after it was replaced cannot write one more row. The clocks of two control
planes must agree to well under the time to live; `now` is theirs.
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
    """The lease, new or renewed; None while somebody else holds it."""
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
    """Lets the next owner in at once; does nothing if `owner` does not hold it."""
    connection.execute(update(lease).where(lease.c.num == 1, lease.c.owner == owner).values(owner="", expires_at=0.0))


def current(connection: Connection) -> Lease | None:
    """The lease as it stands, expired or not; None: nobody ever held it, or it was released."""
    row = connection.execute(select(lease.c.owner, lease.c.epoch, lease.c.expires_at)).one()
    return Lease(row.owner, row.epoch, row.expires_at) if row.owner else None


def hold(connection: Connection, epoch: int) -> None:
    """Pins the lease until this transaction ends. Raises LeaseLost: its epoch is another one."""
    row = connection.execute(select(lease.c.epoch, lease.c.owner).with_for_update(read=True)).one()
    if row.epoch != epoch:
        raise LeaseLost(epoch, row.epoch, row.owner)
