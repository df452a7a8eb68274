"""The goodput ledger of a job that has no supervisor: in the queue, paused, between two attempts. Called by `JobEdit`.

During an attempt the supervisor keeps the ledger (core/attempt/booking.py) and reports it with every status. The store
accounts the time before, after and between attempts, at each change of the job's state, so that every second is
accounted exactly once.
"""

from __future__ import annotations

from sqlalchemy import Connection

from shoal_service.core import goodput
from shoal_service.core.goodput import Category, Goodput
from shoal_service.store.records import JobRecord, load_spec
from shoal_workers.contract.job import JobState


def book(
    connection: Connection, job: JobRecord, state: JobState, shown: Goodput | None, now: float, *, under: str | None
) -> Goodput:
    """Adds the time up to `now`, which the job has spent in `state`, to the goodput `shown` so far; to the account
    `under` if there is one, and with it the time of a step that was not completed."""
    ledger = goodput.resume(shown, at=now)
    if state is JobState.PAUSED or state.ended:
        return goodput.show(goodput.account(ledger, Category.IDLE, requested=0, now=now))
    requested = load_spec(connection, job.num, job.spec_version).elasticity.max_workers
    if under is not None:
        ledger = goodput.discard(ledger, under)
    else:
        under = _ACCOUNTS.get(state, Category.IDLE)  # idle: since the last report of its supervisor
    return goodput.show(goodput.account(ledger, under, requested=requested, now=now))


def newest(known: Goodput | None, reported: Goodput | None) -> Goodput | None:
    """The larger of the two, which includes the other: a supervisor continues the ledger that the job had before. Not
    the later one: the wall clock may have been set back."""
    if known is None or reported is None or known.at is None or reported.at is None:
        return reported or known
    return reported if reported.total >= known.total else known


_ACCOUNTS = {JobState.QUEUED: Category.QUEUED, JobState.STARTING: Category.STARTING}
