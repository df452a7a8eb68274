"""Requests of users about jobs: create, patch, run, pause, cancel, move, extend, retry and archive.

Labels and annotations are changed by JSON Merge Patch. The table `job_labels` repeats the labels of the spec, so that a
query can select jobs by them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, insert, select

from shoal_service.core import alerts
from shoal_service.core.desired import Desired
from shoal_service.core.events import (
    JobArchived,
    JobCreated,
    JobExtended,
    JobMoveRequested,
    JobPatched,
    JobRequested,
    JobRetried,
)
from shoal_service.core.goodput import Goodput
from shoal_service.core.job_machine import ATTEMPT_STATES, Reopened, Requested, step
from shoal_service.core.lifecycle import Answer, Training, extension, retrial
from shoal_service.store import access, archives, checkpoint_rows, island_rounds, queueing, webhook_lanes
from shoal_service.store.database import Transaction, events, insert_on_conflict, job_labels, job_specs, jobs
from shoal_service.store.edit import JobEdit, edit_job, log_event
from shoal_service.store.errors import (
    IdempotencyConflict,
    JobEnded,
    JobNotEnded,
    LifecycleConflict,
    PreconditionFailed,
    RequestConflict,
)
from shoal_service.store.records import (
    JobRecord,
    dump_data,
    load_view,
    make_etag,
    merge_patch,
    read_spec,
    status_document,
)
from shoal_service.views import DataPatch, JobPatch, JobStatus, JobView, WorkerPatch
from shoal_workers.contract import SWEEP_LABEL, JobSpec, JobState, StopSpec, earliest_step, planned, weight_changes_of
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.text_data import TEXT_TASKS

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ACTIONS = {Desired.RUN: "resume", Desired.PAUSE: "be paused", Desired.CANCEL: "be cancelled"}
_MESSAGES = {
    Desired.RUN: "Resumed on request.",
    Desired.PAUSE: "Paused on request.",
    Desired.CANCEL: "Cancelled on request.",
}
# Built once: building a statement takes longer than running it, and each submission runs these.
_INSERT_SPEC = insert(job_specs)
_INSERT_EVENT = insert(events)
_INSERT_LABEL = insert(job_labels)


def create(
    tx: Transaction, spec: JobSpec, *, idempotency_key: str | None, now: float, note: str = ""
) -> tuple[JobView, bool]:
    """Create a job. Return it, and True; or the job of an earlier request with this key, and False.

    Raises:
        IdempotencyConflict, QueueFull
        SpecError: the checkpoint that `continue_from` names does not exist, or `islands.run` is no run to join.
    """
    spec_hash = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    key_hash = None if idempotency_key is None else hashlib.sha256(idempotency_key.encode()).hexdigest()
    job_id = "job-" + "".join(secrets.choice(_ALPHABET) for _ in range(12))
    earlier = _find_by_key(tx, idempotency_key, key_hash, spec_hash)
    if earlier is not None:
        return earlier, False
    spec = _set_run(tx, checkpoint_rows.resolved(tx, spec), job_id)
    document, origin = spec.model_dump_json(), spec.continue_from
    start_step = (origin.step or 0) if origin is not None else 0
    status = JobStatus(
        message="Waiting for the scheduler.",
        note=note,
        goodput=Goodput(at=now),
        step=start_step,
        alerts=alerts.begin(spec.alerts),
    )
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
        "failure_step": start_step,
        "created_at": now,
        "updated_at": now,
        "status": status_document(status),
        "workers": "[]",
        "queued_at": now,
        **checkpoint_rows.hold_columns(spec),
    }
    insertion = insert_on_conflict(tx, jobs).on_conflict_do_nothing(index_elements=["idempotency_key_hash"])
    num = tx.execute(insertion.returning(jobs.c.num), row).scalar_one_or_none()
    if num is None:  # a request with the same key was committed since the query above
        earlier = _find_by_key(tx, idempotency_key, key_hash, spec_hash)
        assert earlier is not None
        return earlier, False
    queueing.require_room_in_queue(tx, spec.project, spec.user)  # after the insertion: the new job counts too
    tx.execute(_INSERT_SPEC, {"job_num": num, "version": 1, "accepted_at": now, "document": document})
    _replace_labels(tx, num, {}, spec.labels)
    webhook_lanes.begin(tx, num, len(spec.webhooks))
    access.note_created(job_id=job_id)
    event = JobCreated(
        **access.make_actor_field(),
        name=spec.name,
        spec_version=1,
        from_job=origin.job if origin is not None else None,
        from_step=origin.step if origin is not None else None,
    )
    row = {"job_num": num, "seq": 1, "at": now, "type": event.type, "data": dump_data(event.data())}
    tx.execute(_INSERT_EVENT, row)
    log_event(tx, job_id, spec.name, event.type, event.data())
    tx.publish(job_id, is_request=True)
    view = JobView(
        id=job_id,
        name=spec.name,
        spec=spec,
        spec_version=1,
        etag=make_etag(job_id, 1),
        created_at=now,
        updated_at=now,
        status=status,
    )
    return view, True


def _set_run(tx: Transaction, spec: JobSpec, job_id: str) -> JobSpec:
    """Return the spec of an island with the id of the job of island 0. Raises SpecError."""
    if spec.islands is None:
        return spec
    if spec.islands.run is not None:
        island_rounds.check_joins(tx, spec.islands.run, spec)
        return spec
    if spec.islands.index != 0:
        raise SpecError.at(
            "islands.run",
            f"islands.index is {spec.islands.index}, and islands.run is not set. Submit all islands together with "
            "`shoal submit`, or set islands.run to the id of the job of island 0.",
        )
    return spec.model_copy(update={"islands": spec.islands.model_copy(update={"run": job_id})})


def patch(tx: Transaction, job_id: str, changes: JobPatch, *, if_match: str | None, now: float) -> JobView:
    """Change the spec of a job.

    Raises:
        JobNotFound, JobEnded, RequestConflict, PreconditionFailed, SpecError
    """
    with edit_job(tx, job_id, now) as edit:
        job = edit.job
        if if_match is not None and not _matches(if_match, make_etag(job.id, job.spec_version)):
            raise PreconditionFailed(job_id, make_etag(job.id, job.spec_version), if_match)
        only_describes = bool(changes.model_fields_set) and changes.model_fields_set <= _DESCRIBING
        if job.state.ended and not only_describes:
            raise JobEnded(job_id, job.state, "be changed, except its name, labels and annotations")
        if job.deleting:
            raise RequestConflict(job_id, job.state, "be changed: it is being deleted")
        before = _read_spec(tx, job, "be changed")
        if changes.data is not None:
            changes = changes.model_copy(update={"data": _plan_weights(job, before, changes.data, now)})
        after = _apply_patch(before, changes)
        archives.require_changeable(job, before, after)
        if after != before:
            version = _accept(tx, job, after, now)
            _replace_labels(tx, job.num, before.labels, after.labels)
            if job.state is JobState.QUEUED:
                edit.book()  # account the time until now with the old number of workers
            edit.set(spec_version=version, name=after.name, priority=after.priority)
            edit.describe(alerts=alerts.begin(after.alerts, job.status.alerts))
            if changes.model_fields_set != {"worker"}:
                edit.event(JobPatched(spec_version=version, **access.make_actor_field(), **_event_fields(changes)))
            if after.worker.cluster != before.worker.cluster:
                fields = {"from_": before.worker.cluster, "to": after.worker.cluster}
                if job.state in ATTEMPT_STATES and job.cluster:
                    fields["running_in"] = job.cluster
                edit.event(JobMoveRequested(spec_version=version, **fields, **access.make_actor_field()))
    tx.publish(job_id, is_request=True)
    return load_view(tx, job_id)


def _accept(tx: Transaction, job: JobRecord, spec: JobSpec, now: float) -> int:
    """Insert the next version of the spec, and return its number."""
    version = job.spec_version + 1
    row = {"job_num": job.num, "version": version, "accepted_at": now, "document": spec.model_dump_json()}
    tx.execute(_INSERT_SPEC, row)
    return version


def request(tx: Transaction, job_id: str, desired: Desired, *, now: float) -> JobView:
    """Run, pause or cancel the job.

    Raises:
        JobNotFound
        RequestConflict, JobEnded: the request is impossible in the job's state.
    """
    requested(tx, job_id, desired, now=now)
    return load_view(tx, job_id)


def requested(tx: Transaction, job_id: str, desired: Desired, *, now: float) -> bool:
    """Do what `request` does. Return True if the job has changed."""
    with edit_job(tx, job_id, now, is_request=True) as edit:
        job = edit.job
        standing = step(job.standing, Requested(desired))
        if standing is None:
            error = JobEnded if job.state.ended else RequestConflict
            raise error(job_id, job.state, _ACTIONS[desired])
        changed = standing != job.standing
        if changed:
            edit.event(JobRequested(desired=desired, **access.make_actor_field()))
            edit.move(standing, "requested", _MESSAGES[desired] if standing.state is not job.state else "")
    return changed


def move(
    tx: Transaction, job_id: str, to: str, *, at_once: bool = False, if_match: str | None = None, now: float
) -> JobView:
    """Move the job to the cluster `to`; with `any` to one that the scheduler chooses.

    Like `patch`, it makes a new version of the spec. The caller has checked that the job can run there.

    Args:
        at_once: end an attempt in another cluster now, after a save, although the job may have to wait in `to`.

    Raises:
        JobNotFound, JobEnded, RequestConflict, PreconditionFailed
    """
    patch(tx, job_id, JobPatch(worker=WorkerPatch(cluster=to)), if_match=if_match, now=now)
    with edit_job(tx, job_id, now) as edit:
        if at_once and edit.job.state in ATTEMPT_STATES and edit.job.cluster not in ("", to):
            edit.set(granted_workers=0)  # as a preemption does: the driver then directs the attempt to save and to end
    return load_view(tx, job_id)


def extend(tx: Transaction, job_id: str, *, steps: int, now: float) -> JobView:
    """Extend the job to `steps` steps in total.

    Raises:
        JobNotFound, RequestConflict, LifecycleConflict, QueueFull
    """
    with edit_job(tx, job_id, now, is_request=True) as edit:
        job = edit.job
        if job.state is JobState.CANCELLING:
            raise RequestConflict(job_id, job.state, "be extended")
        spec = _read_spec(tx, job, "go on")
        reopens = _require_possible(job, extension(_describe_training(tx, job, spec), steps)).reopens
        after = spec.model_copy(update={"stop": StopSpec(steps=steps)})
        version, by = _accept(tx, job, after, now), access.make_actor_field()
        edit.set(spec_version=version)
        edit.event(JobExtended(spec_version=version, steps=steps, done=job.status.step, reopened=reopens, **by))
        if reopens:
            _reopen(edit, after, "Extended on request.")
    if reopens:
        queueing.require_room_in_queue(tx, spec.project, spec.user)
    return load_view(tx, job_id)


def retry(tx: Transaction, job_id: str, *, now: float) -> JobView:
    """Queue a failed job again, under the same id.

    Raises:
        JobNotFound, LifecycleConflict, RequestConflict, QueueFull
    """
    with edit_job(tx, job_id, now, is_request=True) as edit:
        job = edit.job
        spec = _read_spec(tx, job, "go on")
        _require_possible(job, retrial(_describe_training(tx, job, spec)))
        edit.event(JobRetried(done=job.status.step, reason=job.status.reason, **access.make_actor_field()))
        _reopen(edit, spec, "Tried again on request.")
    queueing.require_room_in_queue(tx, spec.project, spec.user)
    return load_view(tx, job_id)


def archive(tx: Transaction, job_id: str, archived: bool, *, now: float) -> JobView:
    """Hide an ended job in the lists of jobs, or show it there again. Raises JobNotFound, JobNotEnded."""
    with edit_job(tx, job_id, now, is_request=True) as edit:
        if archived and not edit.job.state.ended:
            raise JobNotEnded(job_id, edit.job.state, "be archived")
        if archived != (edit.job.archived_at is not None):
            edit.event(JobArchived(archived=archived, **access.make_actor_field()))
            edit.set(archived_at=now if archived else None)
    return load_view(tx, job_id)


def _find_by_key(tx: Transaction, key: str | None, key_hash: str | None, spec_hash: str) -> JobView | None:
    """Find the job of an earlier request with this key. Raises IdempotencyConflict."""
    if key is None:
        return None
    query = select(jobs.c.id, jobs.c.spec_hash).where(jobs.c.idempotency_key_hash == key_hash)
    row = tx.execute(query).one_or_none()
    if row is None:
        return None
    if row.spec_hash != spec_hash:
        raise IdempotencyConflict(key, row.id)
    return load_view(tx, row.id)


_REPLACED = {"name", "priority", "finish_by", "parallelism", "stop", "alerts"}
"""Keys that a request replaces as a whole."""
_DESCRIBING = {"name", "labels", "annotations"}
"""Keys that only describe a job, so that they can be changed after its end too."""
_WITH_NULLS = {"schedule", "validation", "optimizer"}
"""Sections in which a null is a value: the keys that a request names are merged into them."""


def _event_fields(changes: JobPatch) -> dict[str, Any]:
    """Return the fields of the event: those that the request names."""
    data = changes.model_dump(exclude_none=True)
    data |= data.pop("data", {})
    data |= _dump(changes, _WITH_NULLS, exclude_unset=True)
    if changes.labels is not None:
        data["labels"] = changes.labels
    if changes.annotations is not None:
        data["annotations"] = sorted(changes.annotations)
    return data


def _dump(
    changes: JobPatch, keys: set[str], *, exclude_unset: bool = False, exclude_none: bool = False
) -> dict[str, Any]:
    """Return these keys of a request, without those that it does not name."""
    document = changes.model_dump(mode="json", include=keys, exclude_unset=exclude_unset, exclude_none=exclude_none)
    return {key: value for key, value in document.items() if value is not None}


def _plan_weights(job: JobRecord, spec: JobSpec, data_patch: DataPatch, now: float) -> DataPatch:
    """Choose the step from which the new weights count. Raises SpecError: the step may have begun; no mixture."""
    if spec.program is not None or spec.task not in TEXT_TASKS or not spec.data.get("sources"):
        raise SpecError.at("data.weights", "the job has no data.sources, and only the weights of a mixture change")
    status = job.status
    is_training = job.state in ATTEMPT_STATES
    age_s = now - status.step_at if status.step_at is not None else 0.0
    earliest = earliest_step(status.step, status.step_s, age_s, is_training=is_training)
    before = weight_changes_of(spec)
    changes = planned(before, data_patch.weights, data_patch.at_step, earliest)
    if data_patch.at_step is not None and data_patch.at_step < earliest and changes != before:
        message = (
            f"data.at_step is {data_patch.at_step}, and the job has completed step {status.step}; its workers learn in "
            f"time of what changes from step {earliest} on. Name a later step, or leave it out."
            if is_training
            else f"data.at_step is {data_patch.at_step}, and the job has completed step {status.step}. Name a later "
            "step, or leave it out."
        )
        raise SpecError.at("data.at_step", message)
    return DataPatch(weights=data_patch.weights, at_step=changes[-1].at_step)


def _apply_patch(spec: JobSpec, changes: JobPatch) -> JobSpec:
    data: dict[str, Any] = spec.model_dump(mode="json")
    data |= _dump(changes, _REPLACED)
    sections = _dump(changes, {"worker", "code"}) | _dump(changes, {"elasticity"}, exclude_none=True)
    for key, section in (sections | _dump(changes, _WITH_NULLS, exclude_unset=True)).items():
        # a script's spec has no schedule, validation or optimizer, and is refused with one
        data[key] = data.get(key, {}) | section
    if changes.data is not None:
        assert changes.data.at_step is not None, "`_plan_weights` has chosen it"
        following = planned(weight_changes_of(spec), changes.data.weights, changes.data.at_step, 1)
        data["data"]["changes"] = [change.model_dump(mode="json") for change in following]
    if changes.labels is not None:
        _require_label_of_sweep(spec, changes.labels)
    for key in ("labels", "annotations"):
        data[key] = merge_patch(data[key], getattr(changes, key) or {})
    return parse_spec(data)


def _matches(if_match: str, etag: str) -> bool:
    """Compare tags as in RFC 9110, section 13.1.1: weak tags match nothing. Tags without quotes are accepted too."""
    tags = [part.strip().strip('"') for part in if_match.split(",")]
    return etag in tags or tags == ["*"]


def _require_label_of_sweep(spec: JobSpec, changes: Mapping[str, str | None]) -> None:
    """Refuse to remove the label that marks the jobs of a sweep. Raises SpecError."""
    if spec.sweep is not None and changes.get(SWEEP_LABEL, spec.sweep.name) is None:
        raise SpecError.at(
            f"labels.{SWEEP_LABEL}",
            f"labels.{SWEEP_LABEL} is set from sweep.name, which is {spec.sweep.name!r}: it cannot be removed.",
        )


def _replace_labels(tx: Transaction, job_num: int, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Update the rows of the labels that differ."""
    removed = [name for name, value in before.items() if after.get(name) != value]
    if removed:
        tx.execute(delete(job_labels).where(job_labels.c.job_num == job_num, job_labels.c.key.in_(removed)))
    rows = [
        {"job_num": job_num, "key": name, "value": value} for name, value in after.items() if before.get(name) != value
    ]
    if rows:
        tx.execute(_INSERT_LABEL, rows)


def _reopen(edit: JobEdit, spec: JobSpec, message: str) -> None:
    """Queue an ended job again, with new budgets. Raises RequestConflict."""
    job = edit.job
    island_rounds.check_reopens(edit.tx, job, spec)
    standing = step(job.standing, Reopened())
    assert standing is not None, "only an ended job is reopened"
    best = job.status.best
    if best is not None:
        edit.describe(best=best.model_copy(update={"num_since": 0}))  # it may have stopped early
    edit.move(standing, "requested", message)
    edit.set(ended_at=None, archived_at=None, failures=0, failure_step=job.status.step, failure=None)
    if job.status.checkpoint_step is None:
        edit.set(**checkpoint_rows.hold_columns(spec))


def _read_spec(tx: Transaction, job: JobRecord, action: str) -> JobSpec:
    """Read the current spec. Raises RequestConflict, which says that the job cannot do `action`."""
    stored = read_spec(tx, job.num, job.spec_version)
    if stored.problem:
        raise RequestConflict(job.id, job.state, f"{action}: its stored spec cannot be read ({stored.problem})")
    return stored.value


def _describe_training(tx: Transaction, job: JobRecord, spec: JobSpec) -> Training:
    has_checkpoint = bool(checkpoint_rows.read_committed(tx, job.id)) or spec.continue_from is not None
    return Training(state=job.state, step=job.status.step, stop=spec.stop, has_checkpoint=has_checkpoint)


def _require_possible(job: JobRecord, answer: Answer) -> Answer:
    """Return the answer. Raises LifecycleConflict if it is a refusal."""
    if answer.problem:
        raise LifecycleConflict(job.id, job.state, answer.problem)
    return answer
