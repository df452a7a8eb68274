"""Stores the reports of supervisors: one transaction, each item exactly once.

Reports of many jobs arrive together. Their points and their jobs' rows, which every report has, are written with one
statement for all of them; what few reports have is written for each.

Reports of another attempt than the current one, or for a job without an attempt, are dropped as a whole. Reports that
were stored before (their number is not above the stored one) only refresh status and workers. Nothing is decided here:
states follow from `core.job_machine`, retries from `core.endings`. A job whose attempt has ended (`_end_attempt`) is
back in the queue, or has ended, with the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Table, func, select

from shoal_service.core import alerts
from shoal_service.core.endings import ENDINGS, AttemptEnd, FailureRecord, RetryDecision, decide_retry
from shoal_service.core.job_machine import ATTEMPT_STATES, AttemptEnded, Reported, step
from shoal_service.core.lifecycle import is_outdated_end
from shoal_service.core.nodes import FIRST_TEST_S
from shoal_service.core.quantities import count_text
from shoal_service.reports import SupervisorReports
from shoal_service.store import archives, curves, node_records, supervisor_links, system_samples
from shoal_service.store.database import Transaction, checkpoints, incidents, series, upsert
from shoal_service.store.edit import RELEASED, JobEdit, newest_goodput, save_all
from shoal_service.store.node_records import Suspicion
from shoal_service.store.records import JobRecord, load, load_spec, read_document, workers_document
from shoal_service.store.sweep_jobs import PRUNED, explain_pruning
from shoal_service.telemetry.catalogue import Exemplar, StepTimes
from shoal_service.views import CheckpointState, CheckpointView, IncidentView
from shoal_workers.contract import ANY_CLUSTER, EndReason

MAX_TRACEBACK_CHARS = 65_536


class DropReason(StrEnum):
    """Why a part of a supervisor's reports was not stored."""

    STALE_ATTEMPT = "stale_attempt"
    DUPLICATE = "duplicate"
    REFUSED_STATE = "refused_state"


@dataclass(frozen=True, slots=True)
class Incoming:
    """Reports that have arrived for a job."""

    job: JobRecord
    """The job, loaded and locked."""
    reports: SupervisorReports
    now: float

    @property
    def is_stale(self) -> bool:
        return self.reports.attempt != self.job.attempt or self.job.state not in ATTEMPT_STATES

    @property
    def is_new(self) -> bool:
        return self.reports.seq > self.job.pulled_seq


def apply(tx: Transaction, job_id: str, reports: SupervisorReports, *, now: float) -> None:
    """Stores each item of reports that the control plane makes in the place of a supervisor exactly once. Drops and
    counts what is stale or impossible. Raises JobNotFound."""
    apply_all(tx, [Incoming(load(tx, job_id, lock=True), reports, now)])


def end_attempt(tx: Transaction, job_id: str, reason: EndReason, message: str, *, now: float) -> None:
    """Ends the job's attempt in the place of its supervisor, if there is one. Raises JobNotFound."""
    job = load(tx, job_id, lock=True)
    end = AttemptEnd(reason=reason, message=message, step=job.status.step)
    reports = SupervisorReports(attempt=job.attempt, seq=0, status=job.status, end=end)
    apply_all(tx, [Incoming(job, reports, now)])


def apply_all(tx: Transaction, incoming: Sequence[Incoming]) -> None:
    """Stores reports of different jobs."""
    dropped: list[list[DropReason]] = [[DropReason.STALE_ATTEMPT] if report.is_stale else [] for report in incoming]
    going_on = [(report, reasons) for report, reasons in zip(incoming, dropped, strict=True) if not report.is_stale]
    _store_series(tx, [report for report, _ in going_on if report.is_new])
    changed = dict.fromkeys((report.job.id for report in incoming), False)
    edits = [_apply(tx, report, reasons) for report, reasons in going_on]
    for (incoming_report, _), has_changed in zip(going_on, save_all(tx, edits), strict=True):
        changed[incoming_report.job.id] = has_changed
    for report, reasons in zip(incoming, dropped, strict=True):
        _note(tx, report, reasons, changed=changed[report.job.id])


def drop_repeated(tx: Transaction, incoming: Incoming) -> None:
    """Counts reports that repeat what is stored, and does not store them."""
    _note(tx, incoming, [DropReason.DUPLICATE], changed=False)


def _note(tx: Transaction, incoming: Incoming, dropped: Sequence[DropReason], *, changed: bool) -> None:
    job_id, reports = incoming.job.id, incoming.reports
    tx.count(*dropped)
    if not dropped:
        tx.keep_exemplars(
            {
                incident.cause: Exemplar(
                    {"job_id": job_id, "incident": f"{reports.attempt}.{incident.id}"},
                    incident.recovery_s,
                    incident.at + incident.recovery_s,
                )
                for incident in reports.incidents
                if incident.closed and incident.recovery_s is not None
            }
        )
    if changed or reports.stacks is not None:
        tx.publish(job_id, is_request=reports.end is not None or reports.stacks is not None)


def _apply(tx: Transaction, incoming: Incoming, dropped: list[DropReason]) -> JobEdit:
    edit, reports = JobEdit(tx, incoming.job, incoming.now), incoming.reports
    if incoming.is_new:
        _store_items(edit, reports)
    elif reports.events or reports.incidents or reports.checkpoints or reports.series or reports.logs:
        dropped.append(DropReason.DUPLICATE)
    if not _follow_status(edit, reports):
        dropped.append(DropReason.REFUSED_STATE)
    if reports.end is not None:
        _end_attempt(edit, reports.end)
    return edit


def _store_series(tx: Transaction, incoming: Sequence[Incoming]) -> None:
    rows, extents = [], []
    for report in incoming:
        if points := report.reports.series:
            rows += [curves.make_row(point, job_num=report.job.num) for point in points]
            steps = [point.step for point in points]
            extents.append(curves.Extent(report.job.num, min(steps), max(steps)))
    upsert(tx, series, rows)
    curves.roll_up(tx, extents)


def _store_items(edit: JobEdit, reports: SupervisorReports) -> None:
    tx, job = edit.tx, edit.job
    edit.set(pulled_seq=reports.seq)
    for event in reports.events:
        edit.add_event(event)
        archives.restore_code(edit, event)
    if reports.incidents:
        of_attempt = [_add_findings(tx, job.num, reports.attempt, incident) for incident in reports.incidents]
        upsert(tx, incidents, [_make_row(incidents, job.num, incident) for incident in of_attempt])
    saved = [_with_history(tx, job.num, checkpoint) for checkpoint in reports.checkpoints]
    upsert(tx, checkpoints, [_make_row(checkpoints, job.num, checkpoint) for checkpoint in saved])
    if any(item_view.state is CheckpointState.COMMITTED for item_view in saved):
        edit.set(**RELEASED)
    if times_s := [point.step_s for point in reports.series if point.val_loss is None]:  # else it repeats its step
        edit.set(step_times=StepTimes.read(job.step_times).add(times_s).text())
    if reports.suspects:
        _suspect(edit, reports)
    system_samples.add(tx, job.num, reports.system)
    for item in reports.profiles:
        supervisor_links.end(edit, item)
    edit.add_lines(reports.logs)


def _add_findings(tx: Transaction, job_num: int, attempt: int, incident: IncidentView) -> IncidentView:
    """Makes it the incident of this attempt, with the stacks and the suspect that are stored. A supervisor that was
    restarted does not know them."""
    kept = {"stacks": incident.stacks, "suspect": incident.suspect}
    if None in kept.values():
        key = (incidents.c.job_num == job_num, incidents.c.attempt == attempt, incidents.c.id == incident.id)
        known = tx.execute(select(incidents.c.document).where(*key)).scalar_one_or_none()
        if known is not None:
            before = IncidentView.model_validate_json(known)
            kept = {"stacks": incident.stacks or before.stacks, "suspect": incident.suspect or before.suspect}
    return incident.model_copy(update={"attempt": attempt, **kept})


def _suspect(edit: JobEdit, reports: SupervisorReports) -> None:
    """Stores the suspicions. The job avoids these nodes for its `health.probation_s`; a test of them runs before."""
    job = edit.job
    probation_s = load_spec(edit.tx, job.num, job.spec_version).health.probation_s
    for suspect in reports.suspects:
        node_records.suspect(
            edit.tx,
            Suspicion(
                node_id=suspect.node_id,
                reason=suspect.reason,
                since=suspect.at,
                job_id=job.id,
                attempt=reports.attempt,
                probation_s=probation_s,
                next_test_at=edit.now + min(FIRST_TEST_S, probation_s),
                num_tests=0,
                job_ids=(job.id,),
                avoided_until=edit.now + probation_s,
            ),
        )


def _follow_status(edit: JobEdit, reports: SupervisorReports) -> bool:
    """Stores the supervisor's status; False: the job cannot go to its state from the current one, so the state is not
    stored."""
    job, reported = edit.job, reports.status
    totals = _TOTALS.where(incidents.c.job_num == job.num)
    num_incidents, steps_lost = map(int, edit.tx.execute(totals).one()) if reports.incidents else (0, 0)
    edit.status = reported.model_copy(
        update={
            "observed_generation": max(reported.observed_generation, job.status.observed_generation),
            # before its first group an attempt has no step of its own; the job has those of the attempts before
            "step": reported.step if reported.generation else max(reported.step, job.status.step),
            "incidents": max(num_incidents, reported.incidents, job.status.incidents),  # over all attempts
            "steps_lost": max(steps_lost, reported.steps_lost, job.status.steps_lost),
            "goodput": newest_goodput(job.status.goodput, reported.goodput),
            "best": reported.best or job.status.best,
            "lost": None if reports.series else job.status.lost,
            "alerts": _follow_alerts(edit, reports),
            "reason": job.status.reason,
            "message": job.status.message,
            "deadline": None,
        }
    )
    workers = workers_document(reports.workers)
    if workers != job.workers_document:
        edit.set(workers=workers)
    standing = step(edit.standing, Reported(reported.state))
    if standing is None:
        return False
    edit.move(standing, reported.reason, reported.message, attempt=job.attempt)
    if standing.state is reported.state:  # else it reported before it knew of a request, and its message is outdated
        edit.describe(reason=reported.reason, message=reported.message, deadline=reported.deadline)
    return True


def _follow_alerts(edit: JobEdit, reports: SupervisorReports) -> tuple[alerts.AlertView, ...]:
    """Looks at the new steps of the reports, and writes an event for each alert that began to hold."""
    points = reports.series if reports.seq > edit.job.pulled_seq else ()
    if reports.end is not None and reports.end.reason is EndReason.NON_FINITE:
        points = (*points, alerts.refused_step(reports.end.step + 1, edit.now))
    followed, events = alerts.follow(edit.job.status.alerts, points)
    for event in events:
        edit.event(event)
    return followed


def _end_attempt(edit: JobEdit, end: AttemptEnd) -> None:
    job = edit.job
    spec = load_spec(edit.tx, job.num, job.spec_version)
    done = max(end.step, edit.status.step)
    record = FailureRecord(job.failures, job.failure_step, spec.retry.max_failures)
    mistake = end.failure.mistake if end.failure is not None else ""
    decision = decide_retry(end.reason, done, record, mistake=mistake, has_run_long=end.has_run_long)
    if end.reason is EndReason.FINISHED and edit.status.observed_generation < job.spec_version:
        known = load_spec(edit.tx, job.num, max(1, edit.status.observed_generation))
        if known.stop is not None and spec.stop is not None and is_outdated_end(done, known.stop, spec.stop):
            why = f"It had ended before it knew of version {job.spec_version} of its spec, and goes on."
            decision = RetryDecision(again=True, charged=False, reason=why)
    if end.reason is EndReason.MOVED and spec.worker.cluster != ANY_CLUSTER:
        words_of_move = f"It moves to the cluster {spec.worker.cluster} with {count_text(done, 'step')} kept."
        decision = RetryDecision(again=True, charged=False, reason=words_of_move)
    standing = step(edit.standing, AttemptEnded(end.reason, decision.again))
    assert standing is not None, "an attempt in ATTEMPT_STATES can always end"
    if decision.charged:
        edit.set(failures=job.failures + 1, failure_step=done)
    if end.failure is not None:
        traceback = end.failure.traceback[-MAX_TRACEBACK_CHARS:]
        edit.set(failure=end.failure.model_copy(update={"traceback": traceback}).model_dump_json())
    edit.describe(step=done)
    is_retried = decision.charged and decision.again
    edit.lose(end.reason, end.message, is_script=spec.script is not None, is_retried=is_retried)
    supervisor_links.end_open(edit, f"the attempt ended: {end.message or end.reason.value}")
    sentence = end.sentence
    text = (sentence, decision.reason) if decision.charged or decision.again else (sentence or decision.reason,)
    if end.reason is EndReason.USER_ERROR and end.failure is not None and not mistake:
        rest = decision.reason.removeprefix(ENDINGS[end.reason].message).strip()
        text = (f"Your code raised {sentence.removesuffix('.')}.", rest)
    message, reason = " ".join(part for part in text if part), end.reason.value
    if end.reason is EndReason.CANCELLED and spec.sweep is not None and (why := explain_pruning(edit.tx, job.num)):
        message, reason = why, PRUNED
    edit.move(standing, reason, message, attempt=job.attempt, step=done)


_TOTALS = select(func.count(), func.coalesce(func.sum(incidents.c.steps_lost), 0))
"""Incidents, and the steps that they have lost."""


def _make_row(table: Table, job_num: int, view: IncidentView | CheckpointView) -> dict[str, Any]:
    """Make the row of a document, with those of its fields that are columns too."""
    columns = view.model_dump(mode="json", include={*table.c.keys()})
    return {**columns, "job_num": job_num, "document": view.model_dump_json()}


def _with_history(tx: Transaction, job_num: int, checkpoint: CheckpointView) -> CheckpointView:
    """Keeps what was known of a checkpoint. A report that it is deleted or damaged leaves out its size, and when and
    how fast it was saved."""
    if checkpoint.state not in (CheckpointState.DELETED, CheckpointState.DAMAGED) or checkpoint.committed_at:
        return checkpoint
    query = select(checkpoints.c.document).where(
        checkpoints.c.job_num == job_num,
        checkpoints.c.step == checkpoint.step,
        checkpoints.c.attempt == checkpoint.attempt,
        checkpoints.c.generation == checkpoint.generation,
    )
    document = tx.execute(query).scalar_one_or_none()
    known = None if document is None else read_document(CheckpointView, document, checkpoint).value
    if known is None:
        return checkpoint
    if known.state is CheckpointState.DELETED:
        return known  # what was deleted since is not damaged
    return known.model_copy(update={"state": checkpoint.state, "message": checkpoint.message})
