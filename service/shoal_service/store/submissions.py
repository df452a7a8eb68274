"""Requests of users: submit, list and patch jobs; run, pause and cancel them. Functions of an open transaction, called
by `Store`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Executable, select, union_all
from sqlalchemy import insert as plain_insert

from shoal_service.core.desired import Desired
from shoal_service.core.events.job import JobCreated, JobMoveRequested, JobPatched, JobRequested
from shoal_service.core.job_machine import ATTEMPT_STATES, Requested, step
from shoal_service.core.selection import LabelSelector
from shoal_service.store.access import audit
from shoal_service.store.database import insert
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import (
    IdempotencyConflict,
    JobEnded,
    PreconditionFailed,
    RequestConflict,
)
from shoal_service.store.lifecycle import code_versions, continuing, labels
from shoal_service.store.reads import cursor as page_cursors
from shoal_service.store.reads.selection import selected
from shoal_service.store.records import (
    SUMMARY_COLUMNS,
    document_of,
    etag_of,
    load,
    load_view,
    read_spec,
    status_document,
    summary_of,
)
from shoal_service.store.scheduling import projects, users
from shoal_service.store.tables import events, job_specs, jobs
from shoal_service.store.webhooks import cursors
from shoal_service.views import Goodput, JobPatch, JobStatus, JobSummary, JobView, Page
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_WORDS = {Desired.RUN: "resume", Desired.PAUSE: "be paused", Desired.CANCEL: "be cancelled"}
_DONE = {
    Desired.RUN: "Resumed on request.",
    Desired.PAUSE: "Paused on request.",
    Desired.CANCEL: "Cancelled on request.",
}
_JobPage = Page[JobSummary]
# Each submission runs these statements, and to build one takes longer than to run it.
_INSERT_SPEC = plain_insert(job_specs)
_INSERT_EVENT = plain_insert(events)


def create(
    connection: Connection, spec: JobSpec, *, idempotency_key: str | None, now: float, note: str = ""
) -> tuple[JobView, bool]:
    """Returns the job, and whether it is new. Raises IdempotencyConflict, QueueFull; SpecError: there is no checkpoint
    as `continue_from` asks for."""
    spec_hash = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    key_hash = None if idempotency_key is None else hashlib.sha256(idempotency_key.encode()).hexdigest()
    job_id = "job-" + "".join(secrets.choice(_ALPHABET) for _ in range(12))
    known = _known(connection, idempotency_key, key_hash, spec_hash)
    if known is not None:
        return known, False
    spec = continuing.resolved(connection, spec)
    document, origin = spec.model_dump_json(), spec.continue_from
    done = (origin.step or 0) if origin is not None else 0
    status = JobStatus(message="Waiting for the scheduler.", note=note, goodput=Goodput(at=now), step=done)
    row = {
        "id": job_id,
        "name": spec.name,
        "state": JobState.QUEUED.value,
        "desired": Desired.RUN.value,
        "priority": spec.priority,
        "project": spec.project,
        "user": spec.user,
        "spec_version": 1,
        "spec_hash": spec_hash,
        "idempotency_key_hash": key_hash,
        "attempt": 0,
        "granted_workers": 0,
        "pulled_seq": 0,
        "event_seq": 1,
        "log_seq": 0,
        "failures": 0,
        "failure_step": done,
        "created_at": now,
        "updated_at": now,
        "status": status_document(status),
        "workers": "[]",
        "queued_at": now,
        **continuing.columns(spec),
    }
    num = connection.execute(_insert_job(connection), row).scalar_one_or_none()
    if num is None:
        created_meanwhile = _known(connection, idempotency_key, key_hash, spec_hash)
        assert created_meanwhile is not None
        return created_meanwhile, False
    projects.require_room_in_queue(connection, spec.project)
    users.require_room_in_queue(connection, spec.user)
    connection.execute(_INSERT_SPEC, {"job_num": num, "version": 1, "accepted_at": now, "document": document})
    labels.replace(connection, num, {}, spec.labels)
    cursors.begin(connection, num, len(spec.webhooks))
    audit.about(job_id)
    event = JobCreated(
        **audit.by(),
        name=spec.name,
        spec_version=1,
        from_job=origin.job if origin is not None else None,
        from_step=origin.step if origin is not None else None,
    )
    row = {"job_num": num, "seq": 1, "at": now, "type": event.type, "data": document_of(event.data())}
    connection.execute(_INSERT_EVENT, row)
    view = JobView(
        id=job_id,
        name=spec.name,
        spec=spec,
        spec_version=1,
        etag=etag_of(job_id, 1),
        created_at=now,
        updated_at=now,
        status=status,
    )
    return view, True


@dataclass(frozen=True, slots=True)
class Which:
    """Which jobs a list holds; None: of all projects, of all users."""

    states: Collection[JobState]
    project: str | None
    user: str | None
    visible: Collection[str] | None
    labels: Collection[LabelSelector] = ()
    search: str = ""


def page(connection: Connection, which: Which, limit: int, cursor: str | None) -> Page[JobSummary]:
    """Newest first. Raises InvalidCursor."""
    after = None if cursor is None else page_cursors.decode(cursor)
    query = select(*SUMMARY_COLUMNS).order_by(jobs.c.num.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(jobs.c.num < after)
    if which.project is not None:
        query = query.where(jobs.c.project == which.project)
    if which.user is not None:
        query = query.where(jobs.c.user == which.user)
    if which.visible is not None:
        query = query.where(jobs.c.project.in_(sorted(which.visible)))
    query = selected(query, which.labels, which.search)
    if which.states:  # one index range per state, merged: a rare state among many jobs is found without a scan
        ranges = [query.where(jobs.c.state == state.value).subquery() for state in sorted(set(which.states))]
        merged = union_all(*(select(part) for part in ranges)).subquery()
        query = select(merged).order_by(merged.c.num.desc()).limit(limit + 1)
    rows = connection.execute(query).all()
    more = len(rows) > limit
    return _JobPage(
        items=tuple(summary_of(row) for row in rows[:limit]),
        next_cursor=page_cursors.encode(rows[limit - 1].num) if more else None,
    )


def patch(connection: Connection, job_id: str, changes: JobPatch, *, if_match: str | None, now: float) -> JobView:
    """Raises JobNotFound, JobEnded, PreconditionFailed, SpecError."""
    job = load(connection, job_id, lock=True)
    if if_match is not None and not _matches(if_match, etag_of(job.id, job.spec_version)):
        raise PreconditionFailed(job_id, etag_of(job.id, job.spec_version), if_match)
    if job.state.ended and not labels.only_describes(changes):
        raise JobEnded(job_id, job.state, "be changed, except its labels and annotations")
    if job.deleting:
        raise RequestConflict(job_id, job.state, "be changed: it is being deleted")
    stored = read_spec(connection, job.num, job.spec_version)
    if stored.problem:
        raise RequestConflict(job_id, job.state, f"be changed: its stored spec cannot be read ({stored.problem})")
    before = stored.value
    after = _patched(before, changes)
    code_versions.require_changeable(job, before, after)
    if after != before:
        version = job.spec_version + 1
        row = {"job_num": job.num, "version": version, "accepted_at": now, "document": after.model_dump_json()}
        connection.execute(_INSERT_SPEC, row)
        labels.replace(connection, job.num, before.labels, after.labels)
        edit = JobEdit(connection, job, now)
        if job.state is JobState.QUEUED:
            edit.book()  # until now the job requested the old number of workers
        edit.set(spec_version=version, priority=after.priority)
        if changes.model_fields_set != {"worker"}:
            edit.event(JobPatched(spec_version=version, **audit.by(), **_changed(changes)))
        if after.worker.cluster != before.worker.cluster:
            clusters = {"from_": before.worker.cluster, "to": after.worker.cluster}
            there = {"running_in": job.cluster} if job.state in ATTEMPT_STATES and job.cluster else {}
            edit.event(JobMoveRequested(spec_version=version, **clusters, **there, **audit.by()))
        edit.save()
    return load_view(connection, job_id)


def request(connection: Connection, job_id: str, desired: Desired, *, now: float) -> tuple[JobView, bool]:
    """Returns the job after the request, and whether it changed. Raises JobNotFound, RequestConflict."""
    job = load(connection, job_id, lock=True)
    standing = step(job.standing, Requested(desired))
    if standing is None:
        error = JobEnded if job.state.ended else RequestConflict
        raise error(job_id, job.state, _WORDS[desired])
    changed = standing != job.standing
    if changed:
        edit = JobEdit(connection, job, now)
        edit.event(JobRequested(desired=desired, **audit.by()))
        edit.move(standing, "requested", _DONE[desired] if standing.state is not job.state else "")
        edit.save()
    return load_view(connection, job_id), changed


def _insert_job(connection: Connection) -> Executable:
    statement = insert(connection, jobs).on_conflict_do_nothing(index_elements=["idempotency_key_hash"])
    return statement.returning(jobs.c.num)


def _known(connection: Connection, key: str | None, key_hash: str | None, spec_hash: str) -> JobView | None:
    """The job of an earlier request with this key. Raises IdempotencyConflict."""
    if key is None:
        return None
    query = select(jobs.c.id, jobs.c.spec_hash).where(jobs.c.idempotency_key_hash == key_hash)
    known = connection.execute(query).one_or_none()
    if known is None:
        return None
    if known.spec_hash != spec_hash:
        raise IdempotencyConflict(key, known.id)
    return load_view(connection, known.id)


def _changed(changes: JobPatch) -> dict[str, Any]:
    """For the event: only what the request names. In these sections a null is a value."""
    data = changes.model_dump(exclude_none=True)
    for key in ("schedule", "validation", "optimizer"):
        section = getattr(changes, key)
        if section is not None:
            data[key] = section.model_dump(mode="json", exclude_unset=True)
    if changes.labels is not None:
        data["labels"] = changes.labels
    if changes.annotations is not None:
        data["annotations"] = sorted(changes.annotations)
    return data


def _patched(spec: JobSpec, changes: JobPatch) -> JobSpec:
    data: dict[str, Any] = spec.model_dump(mode="json")
    if changes.elasticity is not None:
        data["elasticity"] |= changes.elasticity.model_dump(mode="json", exclude_none=True)
    if changes.parallelism is not None:
        data["parallelism"] = changes.model_dump(mode="json")["parallelism"]
    if changes.priority is not None:
        data["priority"] = changes.priority
    if changes.finish_by is not None:
        data["finish_by"] = changes.finish_by
    if changes.stop is not None:
        data["stop"] = changes.stop.model_dump(mode="json")
    if changes.worker is not None:
        data["worker"] |= changes.worker.model_dump(mode="json")
    for key in ("schedule", "validation", "optimizer"):
        section = getattr(changes, key)
        if section is not None:
            data[key] |= section.model_dump(mode="json", exclude_unset=True)
    if changes.code is not None:
        data["code"] |= changes.code.model_dump(mode="json")
    if changes.labels is not None:
        labels.require_label_of_sweep(spec, changes.labels)
        data["labels"] = labels.merged(spec.labels, changes.labels)
    if changes.annotations is not None:
        data["annotations"] = labels.merged(spec.annotations, changes.annotations)
    return parse_spec(data)


def _matches(if_match: str, etag: str) -> bool:
    """RFC 9110, section 13.1.1: weak tags match nothing. Tags without quotes are accepted too."""
    given = [part.strip().strip('"') for part in if_match.split(",")]
    return etag in given or given == ["*"]
