"""JobEdit: the change of one job in one transaction. The row and its events are written together, or not at all.

Used by submissions.py, driving.py and reports.py. The row must have been read with `records.load(..., lock=True)`: the
event numbers are taken from it, so they have no gaps within a job and become visible in their order.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, insert, update

from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.job import JobStateChanged
from shoal_service.core.job_machine import ATTEMPT_STATES, JobStanding
from shoal_service.core.lost_attempt import LostAttempt, after_end
from shoal_service.reports import PendingEvent
from shoal_service.store import ledgers
from shoal_service.store.records import JobRecord, document_of, plain_text, status_document
from shoal_service.store.tables import events, jobs, queue_places
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState


class JobEdit:
    """Collects changed columns and new events until `save`."""

    def __init__(self, connection: Connection, job: JobRecord, now: float) -> None:
        self.connection = connection
        self.job = job
        self.now = now
        self.standing = job.standing
        self.status: JobStatus = job.status
        self._columns: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []

    def set(self, **columns: Any) -> None:
        self._columns.update(columns)

    def event(self, event: JobEvent) -> None:
        self.add_event(PendingEvent.of(event, self.now))

    def add_event(self, event: PendingEvent) -> None:
        """One that a supervisor has reported."""
        self._events.append(
            {
                "job_num": self.job.num,
                "seq": self.job.event_seq + len(self._events) + 1,
                "at": event.at,
                "type": plain_text(event.type)[:64],
                "data": document_of(event.data),
            }
        )

    def describe(self, **fields: Any) -> None:
        """Changes fields of the status document."""
        self.status = self.status.model_copy(update=fields)

    def book(self, under: str | None = None) -> None:
        """Accounts the time up to now in the goodput ledger of a job that has no supervisor; `under`: not as the job's
        state says."""
        shown = ledgers.book(self.connection, self.job, self.standing.state, self.status.goodput, self.now, under=under)
        self.describe(goodput=shown)

    def lose(self, reason: EndReason, message: str) -> None:
        """The attempt has ended for this reason: notes what the job has lost with it. Before `move`."""
        status = self.status
        ended = LostAttempt(
            attempt=self.job.attempt,
            generation=status.generation,
            workers=status.workers,
            layout=status.layout,
            step=status.step,
            at=self.now,
            last_report_at=self.job.status.goodput.at if self.job.status.goodput is not None else None,
            message=message,
        )
        self.describe(lost=after_end(status.lost, ended, reason, saved_step=status.checkpoint_step or 0))

    def move(
        self,
        to: JobStanding,
        reason: str,
        message: str,
        *,
        attempt: int | None = None,
        step: int | None = None,
        workers: int | None = None,
    ) -> None:
        """Changes the standing of the job, with an event if its state changes."""
        before = self.standing.state
        if to.state is not before and not (before in ATTEMPT_STATES and to.state in ATTEMPT_STATES):
            self.book()
        self.standing = to
        if to.state is before:
            return
        self.describe(reason=reason, message=message, deadline=None)
        if before is JobState.QUEUED:
            self.connection.execute(delete(queue_places).where(queue_places.c.job_num == self.job.num))
        if not to.state.holds_workers:
            self.describe(workers=0, tokens_per_s=None, eta_s=None, note="")
            self.set(granted_workers=0, workers="[]")
        if to.state.ended:
            self.describe(lost=None)
            self.set(ended_at=self.now)
        if to.state is JobState.SUCCEEDED:
            self.set(failure=None)
        known = {"attempt": attempt, "step": step, "workers": workers}
        where = {name: value for name, value in known.items() if value is not None}
        self.event(JobStateChanged(from_=before, to=to.state, reason=reason, message=message, **where))

    def save(self) -> bool:
        """Writes the changes; False: there were none."""
        columns = dict(self._columns)
        if self.standing.state is not self.job.state:
            columns["state"] = self.standing.state.value
        if self.standing.desired is not self.job.desired:
            columns["desired"] = self.standing.desired.value
        document = status_document(self.status)
        if document != self.job.status_document:
            columns["status"] = document
        if self._events:
            columns["event_seq"] = self.job.event_seq + len(self._events)
            self.connection.execute(insert(events), self._events)
        if not columns:
            return False
        columns["updated_at"] = self.now
        self.connection.execute(update(jobs).where(jobs.c.num == self.job.num).values(columns))
        return True
