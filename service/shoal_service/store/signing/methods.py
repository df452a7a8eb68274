"""SigningMethods: private keys of attempts, a part of `Store`. The key of a running attempt is in the database, so that
whichever control plane holds the lease can sign.
"""

from __future__ import annotations

from sqlalchemy import delete, insert, select

from shoal_service.store import lease as leases
from shoal_service.store.database import Database
from shoal_service.store.records import load
from shoal_service.store.signing.tables import signing_keys


class SigningMethods:
    _database: Database

    def signing_key(self, job_id: str, attempt: int) -> str | None:
        """The private key of an attempt; None: it began without one, or the key was lost. Raises JobNotFound."""
        with self._database.read() as tx:
            job = load(tx, job_id)
            query = select(signing_keys.c.seed).where(
                signing_keys.c.job_num == job.num, signing_keys.c.attempt == attempt
            )
            seed: str | None = tx.execute(query).scalar_one_or_none()
            return seed

    def keep_signing_key(self, job_id: str, attempt: int, seed: str, *, epoch: int) -> None:
        """In place of the key that the job has, if it has any. Raises JobNotFound, LeaseLost."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            job = load(tx, job_id, lock=True)
            tx.execute(delete(signing_keys).where(signing_keys.c.job_num == job.num))
            tx.execute(insert(signing_keys).values(job_num=job.num, attempt=attempt, seed=seed))
