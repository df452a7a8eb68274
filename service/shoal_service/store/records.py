"""A job's row as a typed value, the views of it, and JSON documents that today's rules may refuse. Never writes.

A document that another release wrote, or that was damaged, yields its readable part: what is refused is left out, and
the rest is read again. A caller that acts on the result must first look at `problem`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json
from sqlalchemy import Row, bindparam, select

from shoal_service.core.desired import Desired
from shoal_service.core.job_machine import ATTEMPT_STATES, JobStanding
from shoal_service.store.database import NEWEST_SPEC, Transaction, growth_answers, job_specs, jobs, queue_places
from shoal_service.store.errors import JobNotFound
from shoal_service.views import GrowthAnswer, JobStatus, JobView, ListedJob, QueuePlace, WorkerView
from shoal_workers.contract import JobSpec, JobState, ProfileRequest, UserFailure
from shoal_workers.contract.plain_text import first_problem, plain, plain_text

M = TypeVar("M", bound=BaseModel)
L = TypeVar("L", bound=ListedJob)
_ROUNDS = 50
_COLUMN_FIELDS = {"state", "attempt", "cluster", "desired_workers", "failure", "held_back"}
"""Fields of JobStatus with their own columns or table; the status document does not hold them."""
QUARANTINED = "quarantined"
"""JobStatus.reason of a job whose stored spec cannot be read."""
WAITS_FOR_CAPACITY = "capacity"
"""JobStatus.reason of a queued job that the scheduler has considered."""
_NOTHING_READABLE = JobSpec.model_validate({"stop": {"steps": 1}})
"""Shown instead of a spec of which nothing can be read."""
_WORKERS = TypeAdapter(tuple[WorkerView, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """What the control loop and the rest of the store read of the row of a job."""

    id: str
    spec_version: int
    state: JobState
    desired: Desired
    attempt: int
    granted_workers: int
    """World size that the scheduler has granted; 0: the job has no attempt."""
    pulled_seq: int
    created_at: float
    priority: int
    status: JobStatus
    pins: tuple[str, ...] = ()
    """Names of the checkpoints that retention does not delete: users have pinned them, or jobs go on from them."""
    profile: ProfileRequest | None = None
    """The open request for a profile."""
    cluster: str = ""
    """Cluster in which its newest attempt has begun; empty: it had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(JobRow):
    """The row of a job at the time of the read."""

    num: int
    name: str
    project: str
    user: str
    spec_hash: str
    event_seq: int
    log_seq: int
    failures: int
    failure_step: int
    updated_at: float
    started_at: float | None
    ended_at: float | None
    sampled_at: float
    sampled_productive: float
    sampled_total: float
    status_document: str
    workers_document: str
    step_times: str
    deleting: bool = False
    """A user or retention deletes it."""
    archived_at: float | None = None

    @property
    def standing(self) -> JobStanding:
        return JobStanding(self.state, self.desired)


def load(tx: Transaction, job_id: str, *, lock: bool = False) -> JobRecord:
    """Read the row of a job, locked until the transaction ends if `lock`. Raises JobNotFound."""
    return make_record(tx.require_row(_BY_ID_LOCKED if lock else _BY_ID, JobNotFound(job_id), {"job_id": job_id}))


def load_all(tx: Transaction, job_ids: Collection[str]) -> dict[str, JobRecord]:
    """Reads the rows of those of the jobs that exist, locked until the transaction ends, in the order of their ids."""
    return {row.id: make_record(row) for row in tx.execute(_BY_IDS_LOCKED, {"job_ids": [*job_ids]})}


def read_job_num(tx: Transaction, job_id: str, *, lock: bool = False) -> int:
    """Read the number of a job, whose row is locked until the transaction ends if `lock`. Raises JobNotFound."""
    num: int = tx.require_row(_NUM_LOCKED if lock else _NUM, JobNotFound(job_id), {"job_id": job_id}).num
    return num


_BY_ID = select(jobs).where(jobs.c.id == bindparam("job_id"))
"""Built once, because to build the statement takes as long as to run it, and reports read a row each."""
_BY_ID_LOCKED = _BY_ID.with_for_update()
_NUM = select(jobs.c.num).where(jobs.c.id == bindparam("job_id"))
_NUM_LOCKED = _NUM.with_for_update()
_BY_IDS_LOCKED = (
    select(jobs).where(jobs.c.id.in_(bindparam("job_ids", expanding=True))).order_by(jobs.c.id).with_for_update()
)


def load_spec(tx: Transaction, num: int, version: int) -> JobSpec:
    """Reads the part of the spec that is readable, if today's rules refuse it; see `read_spec`."""
    return read_spec(tx, num, version).value


def read_spec(tx: Transaction, num: int, version: int) -> Readable[JobSpec]:
    query = select(job_specs.c.document).where(job_specs.c.job_num == num, job_specs.c.version == version)
    return read_spec_text(tx.execute(query).scalar_one())


def describe_quarantine(spec: Readable[JobSpec]) -> str:
    return (
        f"This release cannot read the job's stored spec ({spec.problem}), so no supervisor runs the job. It goes on "
        "under a release that can read it; otherwise cancel it and submit it again."
    )


def load_view(tx: Transaction, job_id: str) -> JobView:
    """Read the view of a job. Raises JobNotFound."""
    query = (
        select(jobs, job_specs.c.document, *PLACE_COLUMNS, *GROWTH_COLUMNS)
        .join(job_specs, NEWEST_SPEC)
        .outerjoin(queue_places, queue_places.c.job_num == jobs.c.num)
        .outerjoin(growth_answers, growth_answers.c.job_num == jobs.c.num)
        .where(jobs.c.id == job_id)
    )
    row = tx.require_row(query, JobNotFound(job_id))
    job, spec, place = make_record(row), read_spec_text(row.document), make_queue_place(row)
    shown: dict[str, Any] = {"held_back": make_growth_answer(row)}
    if place is not None:
        shown |= {"reason": WAITS_FOR_CAPACITY, "message": place.reason}
    if spec.problem and not job.state.ended:
        shown |= {"reason": QUARANTINED, "message": describe_quarantine(spec)}
    if tx.unwritten and job.state in ATTEMPT_STATES:
        shown["note"] = f"{tx.unwritten} The job may be further than is shown here."
    return JobView(
        id=job.id,
        name=job.name,
        spec=spec.value,
        spec_version=job.spec_version,
        etag=make_etag(job.id, job.spec_version),
        created_at=job.created_at,
        updated_at=job.updated_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        archived_at=job.archived_at,
        status=job.status.model_copy(update=shown),
        queue=place,
    )


PLACE_COLUMNS = (
    queue_places.c.position,
    queue_places.c.reason,
    queue_places.c.holders,
    queue_places.c.expected_at,
    queue_places.c.decided_at,
    jobs.c.queued_at,
)


def make_queue_place(row: Row[*tuple[Any, ...]]) -> QueuePlace | None:
    """The place in the queue, from PLACE_COLUMNS of an outer join. None if the job is not queued, or no pass has
    considered it yet."""
    if row.position is None:
        return None
    return QueuePlace(
        position=row.position,
        reason=row.reason,
        holders=tuple(json.loads(row.holders)),
        expected_at=row.expected_at,
        decided_at=row.decided_at,
        waiting_since=row.queued_at,
    )


GROWTH_COLUMNS = (
    growth_answers.c.workers.label("answered_workers"),
    growth_answers.c.max_workers,
    growth_answers.c.limit.label("growth_limit"),
    growth_answers.c.reason.label("growth_reason"),
    growth_answers.c.decided_at.label("growth_decided_at"),
)


def make_growth_answer(row: Row[*tuple[Any, ...]]) -> GrowthAnswer | None:
    """The answer about growth, from GROWTH_COLUMNS and the job's grant. None if nothing holds the job back, or its
    grant has changed since."""
    if not row.growth_limit or not row.granted_workers or row.answered_workers != row.granted_workers:
        return None
    return GrowthAnswer(
        limit=row.growth_limit,
        reason=row.growth_reason,
        max_workers=row.max_workers,
        decided_at=row.growth_decided_at,
    )


def make_record(row: Row[Any]) -> JobRecord:
    parsed = {
        "state": JobState(row.state),
        "desired": Desired(row.desired),
        "status": make_status(row),
        "status_document": row.status,
        "workers_document": row.workers,
        "pins": parse_pins(row.pins),
        "profile": parse_profile(row.profile),
    }
    return JobRecord(**columns_for(JobRecord, row) | parsed)


def columns_for(model: Any, row: Row[Any]) -> dict[str, Any]:
    """Return the columns of the row that have the name of a field of the model."""
    return {name: value for name, value in row._mapping.items() if name in _field_names(model)}


@cache
def _field_names(model: Any) -> frozenset[str]:
    return frozenset(model.model_fields if issubclass(model, BaseModel) else (field.name for field in fields(model)))


def make_etag(job_id: str, spec_version: int) -> str:
    """The tag of the spec, the part of a job that a user can change: a new status does not invalidate an edit."""
    return f"{job_id}-v{spec_version}"


QUEUE_POSITION = (
    select(queue_places.c.position).where(queue_places.c.job_num == jobs.c.num).correlate(jobs).scalar_subquery()
)
SUMMARY_COLUMNS = (
    *(jobs.c[name] for name in ("num", "id", "name", "state", "project", "user", "cluster", "priority")),
    *(jobs.c[name] for name in ("granted_workers", "created_at", "updated_at", "status")),
    QUEUE_POSITION.label("queue_position"),
)


def listed_job(model: type[L], row: Row[*tuple[Any, ...]], status: Mapping[str, Any], **others: Any) -> L:
    """Make an entry of a list from the columns of a job and the fields of its status.

    A status that cannot be read is left out. `others`: more fields of the entry.
    """
    known = {name: status[name] for name in _status_fields(model) if status.get(name) is not None}
    if isinstance(goodput := status.get("goodput"), dict):
        known["goodput"] = goodput.get("ratio")
    if row.queue_position is not None:
        known["reason"] = WAITS_FOR_CAPACITY
    columns = columns_for(model, row) | {"desired_workers": row.granted_workers}
    try:
        return model(**columns | known | others)
    except ValidationError:
        return model(**columns | others)


@cache
def _status_fields(model: type[ListedJob]) -> frozenset[str]:
    """Return the fields of an entry that the status document has too."""
    return frozenset(model.model_fields.keys() & JobStatus.model_fields.keys() - _COLUMN_FIELDS - {"goodput"})


def parse_fields(document: str) -> dict[str, Any]:
    """Return the fields of a stored document, without validation, since lists are long; none if it is damaged."""
    try:
        fields = json.loads(document)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def status_document(status: JobStatus) -> str:
    return status.model_dump_json(exclude=_COLUMN_FIELDS, exclude_defaults=True)


def workers_document(workers: tuple[WorkerView, ...]) -> str:
    return _WORKERS.dump_json(workers).decode()


def parse_workers(document: str) -> list[WorkerView]:
    return list(_WORKERS.validate_json(document))


def dump_data(data: dict[str, Any]) -> str:
    """The JSON of an event's data, which may hold any value of a user's code: never fails, never writes NaN."""
    try:
        return to_json(plain(data), inf_nan_mode="null", serialize_unknown=True).decode()
    except (PydanticSerializationError, ValueError):
        return to_json({"repr": plain_text(repr(data))}).decode()


def make_status(row: Row[Any]) -> JobStatus:
    """The status, from the columns status, failure, state, attempt, cluster and granted_workers."""
    columns: dict[str, Any] = {
        "state": JobState(row.state),
        "attempt": row.attempt,
        "cluster": row.cluster,
        "desired_workers": row.granted_workers,
    }
    if row.failure is not None:
        columns["failure"] = UserFailure.model_validate_json(row.failure)
    return read_status(row.status).model_copy(update=columns)


def merge_patch(before: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Merge labels by JSON Merge Patch (RFC 7396) of one level: null removes a label."""
    merged = {**before, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def parse_pins(document: str) -> tuple[str, ...]:
    return tuple(json.loads(document))


def parse_profile(document: str) -> ProfileRequest | None:
    """The request for a profile; None if this release cannot read it, since it only describes what a person wanted to
    see."""
    try:
        return ProfileRequest.model_validate_json(document) if document else None
    except ValidationError:
        return None


def read_status(document: str) -> JobStatus:
    """Reads the part of a status that is readable. A status only describes, and the next report replaces it."""
    return read_document(JobStatus, document, JobStatus()).value


def read_spec_text(document: str) -> Readable[JobSpec]:
    """Reads the part of a stored spec that is readable, if today's rules refuse it."""
    return read_document(JobSpec, document, _NOTHING_READABLE)


@dataclass(frozen=True, slots=True)
class Readable(Generic[M]):
    value: M
    problem: str
    """What was refused, one line; empty: nothing was."""


def read_document(model: type[M], document: str, fallback: M) -> Readable[M]:
    """Reads a document. `fallback`: the value if nothing of the document can be read."""
    try:
        return Readable(model.model_validate_json(document), "")
    except ValidationError as error:
        problem = _in_one_line(error)
    try:
        raw: Any = json.loads(document)
    except ValueError:
        return Readable(fallback, problem)
    for _ in range(_ROUNDS):
        if not isinstance(raw, dict):
            break
        try:
            return Readable(model.model_validate(raw), problem)
        except ValidationError as error:
            if not all(_left_out(raw, detail["loc"]) for detail in error.errors()):
                break
    return Readable(fallback, problem)


def _left_out(raw: dict[str, Any], where: tuple[int | str, ...]) -> bool:
    """Removes the innermost key of the path that exists, in place. False: there is none, so a key is missing."""
    place, parents = raw, []
    for step in where:
        if not isinstance(place, dict) or step not in place:
            break  # the tag of a union, or an element of a list: its key goes as a whole
        parents.append((place, step))
        place = place[step]
    if not parents:
        return False
    holder, key = parents[-1]
    del holder[key]
    return True


def _in_one_line(error: ValidationError) -> str:
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{first_problem(error)}{more}"
