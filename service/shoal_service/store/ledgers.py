"""The goodput ledger of a job while no supervisor keeps it: in the queue, paused, between two lives.

A supervisor takes the ledger over with its attempt (core/attempt/booking.py) and tells it with every status. Here the
store books what is before, after and between, each time that a job changes its state, so that nothing is left out and
nothing is booked twice.
"""

from __future__ import annotations

from sqlalchemy import Connection

from shoal_service.core import goodput
from shoal_service.core.goodput import Category
from shoal_service.store.records import JobRecord, load_spec
from shoal_service.views import Goodput
from shoal_workers.contract.job import JobState


def book(connection: Connection, job: JobRecord, state: JobState, shown: Goodput | None, now: float) -> Goodput:
    """The time up to `now`, which the job has spent in `state`; `shown` is what was booked before."""
    ledger = goodput.resume(shown, at=now)
    if state is JobState.PAUSED or state.ended:
        return goodput.show(goodput.account(ledger, Category.IDLE, asked=0, now=now))
    asked = load_spec(connection, job.num, job.spec_version).elasticity.max_workers
    under = _ACCOUNTS.get(state, Category.IDLE)  # idle: since the last word of its supervisor
    return goodput.show(goodput.account(ledger, under, asked=asked, now=now))


def newest(known: Goodput | None, told: Goodput | None) -> Goodput | None:
    """A supervisor goes on with what the job had before: the later one of two holds the other."""
    if known is None or told is None or known.at is None or told.at is None:
        return told or known
    return told if told.at >= known.at else known


_ACCOUNTS = {JobState.QUEUED: Category.QUEUED, JobState.STARTING: Category.STARTING}
