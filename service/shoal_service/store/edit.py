"""JobEdit: the change of one job in one transaction. Its row, events and log are written together, or not at all.
`edit_job` makes one. `save_all` writes those of many jobs with few statements, since their reports arrive together.

The log holds what the workers print, and one line per event, with stream `shoal` and without a worker: the log of a job
that prints nothing tells what happens to it. The lines of one transaction are numbered in the order of their times.

The goodput ledger of a job that has no supervisor (in the queue, paused, between two attempts) is kept here too, at
each change of the job's state. During an attempt the supervisor keeps it (core/attempt/machine.py) and reports it with
every status. So every second is accounted exactly once.

The row must have been read with `records.load(..., lock=True)`: the event numbers are taken from it, so they have no
gaps within a job and become visible in their order. Whoever edits a job publishes it (`Transaction.publish`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from sqlalchemy import Update, bindparam, delete, insert, update

from shoal_service.core import goodput
from shoal_service.core.downsampling import sample_is_due
from shoal_service.core.endings import LostAttempt, after_end
from shoal_service.core.events import JobEvent, JobStateChanged, Severity
from shoal_service.core.events.catalogue import describe, is_logged
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.job_machine import ATTEMPT_STATES, JobStanding
from shoal_service.reports import PendingEvent, PendingLog
from shoal_service.store import curves
from shoal_service.store.curves import thin_events
from shoal_service.store.database import Transaction, events, jobs, logs, queue_places
from shoal_service.store.errors import RequestConflict
from shoal_service.store.records import JobRecord, dump_data, load, load_spec, status_document
from shoal_service.views import JobStatus
from shoal_workers.contract import EndReason, JobState, LogStream
from shoal_workers.contract.plain_text import plain_text

MAX_LOG_LINES = 20_000
"""Number of log lines that are kept of a job, the newest ones."""
MAX_LOG_LINE_CHARS = 16_384
_JOB_NUM = "num_of_job"
_LEVELS = {Severity.WARNING: logging.WARNING, Severity.ERROR: logging.ERROR}
RELEASED: dict[str, str | None] = {"held": None}
"""The columns of a job's row if it needs no checkpoint of another job any more."""
_ACCOUNTS = {JobState.QUEUED: Category.QUEUED, JobState.STARTING: Category.STARTING}


class JobEdit:
    """Collects changed columns, new events and lines of the log until `save`."""

    def __init__(self, tx: Transaction, job: JobRecord, now: float) -> None:
        self.tx = tx
        self.job = job
        self.now = now
        self.standing = job.standing
        self.status: JobStatus = job.status
        self._columns: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []
        self._lines: list[PendingLog] = []

    @property
    def spec_version(self) -> int:
        """The newest version, with the changes."""
        return int(self._columns.get("spec_version", self.job.spec_version))

    def set(self, **columns: Any) -> None:
        self._columns.update(columns)

    def event(self, event: JobEvent) -> None:
        self.add_event(PendingEvent.of(event, self.now))

    def add_event(self, event: PendingEvent) -> None:
        """Adds an event that a supervisor has reported."""
        self._events.append(
            {
                "job_num": self.job.num,
                "seq": self.job.event_seq + len(self._events) + 1,
                "at": event.at,
                "type": plain_text(event.type)[:64],
                "data": dump_data(event.data),
            }
        )

    def add_lines(self, lines: Iterable[PendingLog]) -> None:
        """Adds lines that workers have printed."""
        self._lines.extend(lines)

    def describe(self, **fields: Any) -> None:
        """Changes fields of the status document."""
        self.status = self.status.model_copy(update=fields)

    def book(self, under: str | None = None) -> None:
        """Accounts the time up to now in the goodput ledger of a job that has no supervisor. `under`: the account, if
        it is not that of the job's state."""
        shown = _book_time(self.tx, self.job, self.standing.state, self.status.goodput, self.now, under=under)
        self.describe(goodput=shown)

    def lose(self, reason: EndReason, message: str, *, is_script: bool = False, is_retried: bool = False) -> None:
        """Notes what the job has lost with an attempt that has ended for this reason. Called before `move`. A script
        that was asked to end had the time to save, and only its next report shows whether it did."""
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
        saved_step = status.step if is_script else status.checkpoint_step or 0
        lost = after_end(status.lost, ended, reason, saved_step=saved_step, is_retried=is_retried)
        self.describe(lost=lost)

    def move(
        self,
        to: JobStanding,
        reason: str,
        message: str,
        *,
        attempt: int | None = None,
        step: int | None = None,
        workers: int | None = None,
        cluster: str | None = None,
        others: Mapping[str, int] | None = None,
    ) -> None:
        """Changes the state of the job, with an event if it is another one. Raises RequestConflict: the job is being
        deleted."""
        before = self.standing.state
        if self.job.deleting:
            raise RequestConflict(self.job.id, before, "change: it is being deleted")
        if to.state is not before and not (before in ATTEMPT_STATES and to.state in ATTEMPT_STATES):
            self.book()  # within an attempt its supervisor keeps the ledger
        self.standing = to
        if to.state is before:
            return
        self.describe(reason=reason, message=message, deadline=None)
        if before is JobState.QUEUED:
            self.tx.execute(delete(queue_places).where(queue_places.c.job_num == self.job.num))
        if not to.state.holds_workers:
            self.describe(workers=0, tokens_per_s=None, eta_s=None, note="")
            self.set(granted_workers=0, workers="[]")
        if to.state is JobState.QUEUED:
            self.set(queued_at=self.now)
        if to.state.ended:
            self.describe(lost=None)
            self.set(ended_at=self.now, **RELEASED)
        if to.state is JobState.SUCCEEDED:
            self.set(failure=None)
        known = {"attempt": attempt, "step": step, "workers": workers, "cluster": cluster, "others": others}
        where: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        self.event(JobStateChanged(from_=before, to=to.state, reason=reason, message=message, **where))

    def save(self, *, is_request: bool = False) -> None:
        """Write the changes, and notify the subscribers of the job if there are any; see `Transaction.publish`."""
        [has_changed] = save_all(self.tx, [self])
        if has_changed:
            self.tx.publish(self.job.id, is_request=is_request)

    def written(self) -> _Written | None:
        """Writes new events and lines, and returns what is left to write; None if nothing has changed. Called by
        `save_all`."""
        columns = dict(self._columns)
        if self.standing.state is not self.job.state:
            columns["state"] = self.standing.state.value
        if self.standing.desired is not self.job.desired:
            columns["desired"] = self.standing.desired.value
        document = self.job.status_document if self.status is self.job.status else status_document(self.status)
        if document != self.job.status_document:
            columns["status"] = document
        if self._events:
            columns["event_seq"] = self.job.event_seq + len(self._events)
            self.tx.execute(insert(events), self._events)
            thin_events(self.tx, self.job.num, before=self.job.event_seq, last=columns["event_seq"])
            for event in self._events:
                message = log_event(self.tx, self.job.id, self.job.name, event["type"], json.loads(event["data"]))
                line = PendingLog(at=event["at"], rank=None, worker_id="", stream=LogStream.SHOAL, text=message)
                self._lines.append(line)
        if self._lines:
            attempt = columns.get("attempt", self.job.attempt)
            columns["log_seq"] = _append_lines(self.tx, self.job, attempt, self._lines)
        if not columns:
            return None
        sample = self._sample(columns.get("granted_workers", self.job.granted_workers))
        if sample is not None:
            columns["sampled_at"] = self.now
            columns["sampled_productive"], columns["sampled_total"] = sample.booked
        columns["updated_at"] = self.now
        return _Written({**columns, _JOB_NUM: self.job.num}, sample)

    def _sample(self, granted: int) -> curves.Sample | None:
        """The sample of the job's goodput; None if it is not due."""
        job, status, state = self.job, self.status, self.standing.state
        changed = (state, granted, status.workers) != (job.state, job.granted_workers, job.status.workers)
        if not changed and not sample_is_due(job.sampled_at, job.created_at, self.now):
            return None
        before = curves.Booked(job.sampled_productive, job.sampled_total)
        return curves.take_sample(job.num, state=state, granted=granted, status=status, before=before, now=self.now)


@contextmanager
def edit_job(tx: Transaction, job_id: str, now: float, *, is_request: bool = False) -> Iterator[JobEdit]:
    """Lock the row of a job, and save its edit at the end of the block; see `JobEdit.save`. Raises JobNotFound."""
    edit = JobEdit(tx, load(tx, job_id, lock=True), now)
    yield edit
    edit.save(is_request=is_request)


@dataclass(frozen=True, slots=True)
class _Written:
    columns: dict[str, Any]
    sample: curves.Sample | None


def save_all(tx: Transaction, edits: Sequence[JobEdit]) -> list[bool]:
    """Writes the changes of edits of different jobs, and returns whether there were any in each.

    One statement writes all that change the same columns: most of the time of a statement goes into the statement, not
    into its rows.
    """
    written = [edit.written() for edit in edits]
    changes = [edit for edit in written if edit is not None]
    curves.store_samples(tx, [change.sample for change in changes if change.sample is not None])
    for columns, same in groupby(sorted(changes, key=_column_names), key=_column_names):
        tx.execute(_update(columns), [edit.columns for edit in same])
    return [edit is not None for edit in written]


def _column_names(change: _Written) -> tuple[str, ...]:
    return tuple(sorted(change.columns))


@cache
def _update(columns: tuple[str, ...]) -> Update:
    """The statement for these columns. Cached, because to build a statement takes longer than to run it."""
    values: dict[str, Any] = {name: bindparam(name) for name in columns if name != _JOB_NUM}
    return update(jobs).where(jobs.c.num == bindparam(_JOB_NUM)).values(values)


def _append_lines(tx: Transaction, job: JobRecord, attempt: int, lines: Sequence[PendingLog]) -> int:
    """Stores lines of an attempt, and deletes the oldest beyond MAX_LOG_LINES. Returns the number of the last."""
    job_num, last = job.num, job.log_seq + len(lines)
    kept = sorted(lines, key=lambda line: line.at)[-MAX_LOG_LINES:]
    rows = [
        {
            "job_num": job_num,
            "seq": seq,
            "at": line.at,
            "rank": line.rank,
            "worker_id": plain_text(line.worker_id)[:128],
            "stream": line.stream.value,
            "text": plain_text(line.text)[:MAX_LOG_LINE_CHARS],
            "attempt": attempt,
        }
        for seq, line in enumerate(kept, last - len(kept) + 1)
    ]
    tx.execute(insert(logs), rows)
    if last > MAX_LOG_LINES:
        tx.execute(delete(logs).where(logs.c.job_num == job_num, logs.c.seq <= last - MAX_LOG_LINES))
    return last


def log_event(tx: Transaction, job_id: str, name: str, type_: str, data: Mapping[str, Any]) -> str:
    """Logs an event of a job after the commit if the log of the server has such events. Returns its message."""
    description = describe(type_, data)
    if is_logged(type_, data):
        tx.log(
            _LEVELS.get(description.severity, logging.INFO), type_, job=job_id, job_name=name, text=description.message
        )
    return description.message


def _book_time(
    tx: Transaction, job: JobRecord, state: JobState, shown: Goodput | None, now: float, *, under: str | None
) -> Goodput:
    """Adds the time up to `now`, which the job has spent in `state`, to the goodput `shown` so far; to the account
    `under` if there is one, and with it the time of a step that was not completed."""
    ledger = goodput.resume(shown, at=now)
    if state is JobState.PAUSED or state.ended:
        return goodput.show(goodput.account(ledger, Category.IDLE, requested=0, now=now))
    requested = load_spec(tx, job.num, job.spec_version).elasticity.max_workers
    if under is not None:
        ledger = goodput.discard(ledger, under)
    else:
        under = _ACCOUNTS.get(state, Category.IDLE)  # idle: since the last report of its supervisor
    return goodput.show(goodput.account(ledger, under, requested=requested, now=now))


def newest_goodput(known: Goodput | None, reported: Goodput | None) -> Goodput | None:
    """The larger of the two ledgers, which includes the other: a supervisor continues the ledger that the job had
    before. The later one may be wrong, because the wall clock may have been set back."""
    if known is None or reported is None or known.at is None or reported.at is None:
        return reported or known
    return reported if reported.total >= known.total else known
