"""The link between the service and the supervisors of running attempts: tokens, reports, directives.

Reports are fenced by the attempt, its token, the life of the supervisor and the numbers of the items; they need no
lease, so that any control plane may take them. Tokens and directives are written under the lease.

Profiles of a job: requests, how they ended, and their views. A job has at most one open request.

The open request is a column of the job's row, which the driver passes on; its view is a row of `profiles`. No trace is
read here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sqlalchemy import Row, and_, bindparam, delete, func, select, update

from shoal_service.core.access import hash_secret
from shoal_service.core.events import ProfileFailed, ProfileRequested, ProfileTaken
from shoal_service.core.job_machine import ACTIVE, ATTEMPT_STATES
from shoal_service.home import AttemptCaller, DirectiveAnswer, HomeReport, ReportReceipt
from shoal_service.reports import StacksAnswer
from shoal_service.store import reporting
from shoal_service.store.database import Transaction, attempt_tokens, directives, in_states, jobs, profiles, upsert
from shoal_service.store.edit import JobEdit, edit_job
from shoal_service.store.errors import (
    AttemptTokenRefused,
    JobEnded,
    ProfileNotFound,
    ProfileOpen,
    RequestConflict,
    SupervisorReplaced,
)
from shoal_service.store.hub import Topic
from shoal_service.store.records import JobRecord, load_all, read_job_num
from shoal_service.views import ProfileBody, ProfileState, ProfileView
from shoal_workers.contract import KEPT_PROFILES, Profiled, ProfileRequest

AttemptKey: TypeAlias = tuple[str, int]
"""Job id, and number of the attempt."""


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A supervisor's report from one request, and its time."""

    caller: AttemptCaller
    report: HomeReport
    now: float
    """When it arrived."""


Outcome: TypeAlias = ReportReceipt | AttemptTokenRefused | SupervisorReplaced


@dataclass(frozen=True, slots=True)
class SupervisorLink:
    """What is known of the supervisor of an attempt that goes on."""

    has_token: bool
    """False: the attempt's supervisor was never given one, or the row was lost."""
    life: int
    """The highest of the supervisors that have reported; 0: none has."""
    reported_at: float
    """When the last report was stored, by the clock of the control plane that took it; 0: none was."""


def keep_token(tx: Transaction, job_id: str, attempt: int, token: str) -> None:
    """Make this the attempt's only token. Raises JobNotFound."""
    job_num = read_job_num(tx, job_id, lock=True)
    of_attempt = and_(attempt_tokens.c.job_num == job_num, attempt_tokens.c.attempt == attempt)
    if not tx.execute(update(attempt_tokens).where(of_attempt).values(hash=hash_secret(token))).rowcount:
        row = {"job_num": job_num, "attempt": attempt, "hash": hash_secret(token), "life": 0, "reported_at": 0.0}
        upsert(tx, attempt_tokens, [row])


def find_attempt_by_token(tx: Transaction, token: str) -> AttemptCaller | None:
    """Return the attempt with this token; None if no attempt that goes on has it."""
    row = tx.execute(_ATTEMPT_BY_TOKEN, {"hash": hash_secret(token)}).one_or_none()
    return AttemptCaller(row.id, row.attempt, hash_secret(token)) if row is not None else None


def take_reports(tx: Transaction, batch: Sequence[ReceivedReport]) -> list[Outcome]:
    """Store each item of these reports exactly once, and return the outcomes in the order of the reports.

    One transaction stores all of them or, if it raises, none. PostgreSQL locks the rows of the jobs in the order of
    their ids. The number of statements does not grow with the number of reports: most of the time of a statement goes
    into the statement, not into its rows.

    A report whose `after` is below what is stored repeats items, and is not stored: its receipt contains the number
    from which the supervisor has to go on.
    """
    outcomes: dict[int, Outcome] = {}
    left = dict(enumerate(batch))
    while left:  # once, unless two are of one job: then each of them sees what the one before has changed
        first = {received.caller.job_id: index for index, received in reversed(left.items())}
        outcomes |= _take(tx, {index: left.pop(index) for index in first.values()})
    return [outcomes[index] for index in range(len(batch))]


def read_links(tx: Transaction) -> Mapping[AttemptKey, SupervisorLink]:
    """Return the links of all attempts that go on."""
    return {
        (row.id, row.attempt): SupervisorLink(row.life is not None, row.life or 0, row.reported_at or 0.0)
        for row in tx.execute(_LINKS)
    }


def put_directive(tx: Transaction, job_id: str, attempt: int, body: str) -> int:
    """Replace the directive of an attempt by `body`, JSON of a Directive; return its number. Raises JobNotFound."""
    job_num = read_job_num(tx, job_id, lock=True)
    last = tx.execute(_DIRECTIVE_OF_JOB, {"job_num": job_num}).one_or_none()
    of_attempt = last if last is not None and last.attempt == attempt else None
    row = {
        "job_num": job_num,
        "attempt": attempt,
        "number": of_attempt.number + 1 if of_attempt is not None else 1,
        "epoch": tx.epoch,
        "body": body,
        "stacks": of_attempt.stacks if of_attempt is not None else "",
    }
    upsert(tx, directives, [row])
    tx.announce(Topic.DIRECTIVES.narrow_to(job_id))
    return int(row["number"])


def read_directive(tx: Transaction, job_id: str, attempt: int) -> DirectiveAnswer | None:
    """Read the newest directive of an attempt; None if there is none yet.

    Raises AttemptTokenRefused: the attempt has ended.
    """
    key = {"job_id": job_id, "attempt": attempt}
    row = tx.require_row(_DIRECTIVE, AttemptTokenRefused(job_id, attempt), key)
    return DirectiveAnswer(number=row.number, directive=json.loads(row.body)) if row.number is not None else None


def read_directive_numbers(tx: Transaction, job_ids: Collection[str]) -> Mapping[str, int]:
    """Return the numbers of the newest directives of these jobs; a job without one, or that has ended, is left out."""
    return {row.id: row.number for row in tx.execute(_DIRECTIVE_NUMBERS) if row.id in job_ids}


def read_stacks_answer(tx: Transaction, job_id: str, attempt: int, number: int) -> StacksAnswer | None:
    """Return the answer to this request for stacks; None if it has not arrived."""
    row = tx.execute(_DIRECTIVE_OF_JOB, {"job_num": read_job_num(tx, job_id)}).one_or_none()
    if row is None or row.attempt != attempt or not row.stacks:
        return None
    answer = StacksAnswer.model_validate_json(row.stacks)
    return answer if answer.number == number else None


def _take(tx: Transaction, batch: Mapping[int, ReceivedReport]) -> dict[int, Outcome]:
    """Store reports of different jobs; return the outcome of each by its index."""
    outcomes: dict[int, Outcome] = {}
    incoming: list[reporting.Incoming] = []
    job_by_id = load_all(tx, [received.caller.job_id for received in batch.values()])
    # After the rows of the jobs are locked: a token that was made meanwhile is seen.
    rows = tx.execute(_TOKENS_OF_JOBS, {"job_nums": [job.num for job in job_by_id.values()]})
    tokens = {row.job_num: row for row in rows}
    reported: list[dict[str, Any]] = []
    for index, received in batch.items():
        job = job_by_id.get(received.caller.job_id)
        outcome = _find_refusal(job, tokens.get(job.num) if job is not None else None, received)
        if outcome is not None:
            outcomes[index] = outcome
            continue
        assert job is not None
        reported.append({"of_job": job.num, "of_life": received.report.life, "at": received.now})
        reports = received.report.reports
        if reports is None or received.report.after < job.pulled_seq:
            outcomes[index] = ReportReceipt(acknowledged=job.pulled_seq)
            if reports is not None:
                unstored = reports.model_copy(update={"end": None, "stacks": None})
                reporting.drop_repeated(tx, reporting.Incoming(job, unstored, received.now))
            continue
        if reports.stacks is not None:
            values = {"of_job": job.num, "answer": reports.stacks.model_dump_json()}
            tx.execute(_ANSWERED, values)
        outcomes[index] = ReportReceipt(acknowledged=max(reports.seq, job.pulled_seq), released=reports.end is not None)
        incoming.append(reporting.Incoming(job, reports, received.now))
    if reported:
        tx.execute(_REPORTED, reported)
    reporting.apply_all(tx, incoming)
    return outcomes


def _find_refusal(job: JobRecord | None, token: Row[Any] | None, received: ReceivedReport) -> Outcome | None:
    """Return the error of a report that must not be stored; None if it may be."""
    caller, reports = received.caller, received.report.reports
    is_current = (
        job is not None
        and token is not None
        and (job.attempt == caller.attempt and job.state in ATTEMPT_STATES)
        and (token.attempt, token.hash) == (job.attempt, caller.token_hash)
    )
    if not is_current or (reports is not None and reports.attempt != caller.attempt):
        return AttemptTokenRefused(caller.job_id, caller.attempt)
    assert token is not None
    return SupervisorReplaced(received.report.life, token.life) if received.report.life < token.life else None


_HAS_ATTEMPT = in_states(ATTEMPT_STATES)
_ATTEMPT_BY_TOKEN = (
    select(jobs.c.id, jobs.c.attempt)
    .join(attempt_tokens, and_(attempt_tokens.c.job_num == jobs.c.num, attempt_tokens.c.attempt == jobs.c.attempt))
    .where(attempt_tokens.c.hash == bindparam("hash"), _HAS_ATTEMPT)
)
_TOKENS_OF_JOBS = select(attempt_tokens).where(attempt_tokens.c.job_num.in_(bindparam("job_nums", expanding=True)))
_REPORTED = (
    update(attempt_tokens)
    .where(attempt_tokens.c.job_num == bindparam("of_job"))
    .values(life=bindparam("of_life"), reported_at=bindparam("at"))
)
_LINKS = (
    select(jobs.c.id, jobs.c.attempt, attempt_tokens.c.life, attempt_tokens.c.reported_at)
    .outerjoin(attempt_tokens, and_(attempt_tokens.c.job_num == jobs.c.num, attempt_tokens.c.attempt == jobs.c.attempt))
    .where(_HAS_ATTEMPT)
)
_DIRECTIVE_NUMBERS = (
    select(jobs.c.id, directives.c.number).join(directives, directives.c.job_num == jobs.c.num).where(_HAS_ATTEMPT)
)
_DIRECTIVE_OF_JOB = select(directives).where(directives.c.job_num == bindparam("job_num"))
_DIRECTIVE = (
    select(directives.c.number, directives.c.body)
    .select_from(jobs)
    .outerjoin(directives, and_(directives.c.job_num == jobs.c.num, directives.c.attempt == jobs.c.attempt))
    .where(jobs.c.id == bindparam("job_id"), jobs.c.attempt == bindparam("attempt"), _HAS_ATTEMPT)
)
_ANSWERED = update(directives).where(directives.c.job_num == bindparam("of_job")).values(stacks=bindparam("answer"))
"""Statements are built once: that takes as long as to run them."""


UNANSWERED_S = 900.0
"""An open request that is older than this is given up when the next one comes, because no supervisor answers it."""


def create(tx: Transaction, job_id: str, body: ProfileBody, *, now: float) -> ProfileView:
    """Makes a request for a profile. Raises JobNotFound, RequestConflict (JobEnded), ProfileOpen."""
    with edit_job(tx, job_id, now) as edit:
        job = edit.job
        if job.state.ended:
            raise JobEnded(job_id, job.state, "be profiled")
        if job.state not in ACTIVE:
            raise RequestConflict(job_id, job.state, "be profiled; only a job with workers can")
        if job.profile is not None:
            if now - job.profile.requested_at < UNANSWERED_S:
                raise ProfileOpen(job_id, job.profile.number, job.profile.rank)
            end_open(edit, f"no answer within {UNANSWERED_S:g} s")
        newest = tx.execute(select(func.max(profiles.c.number)).where(profiles.c.job_num == job.num)).scalar_one()
        request = ProfileRequest(number=(newest or 0) + 1, rank=body.rank, steps=body.steps, requested_at=now)
        view = _make_request_view(edit, request)
        _write(tx, job.num, view)
        old = profiles.c.number <= request.number - KEPT_PROFILES
        tx.execute(delete(profiles).where(profiles.c.job_num == job.num, old))
        edit.set(profile=request.model_dump_json())
        edit.event(ProfileRequested(number=request.number, rank=request.rank, steps=request.steps))
    return view


def views(tx: Transaction, job_id: str) -> list[ProfileView]:
    """The profiles of a job, oldest first. Raises JobNotFound."""
    query = (
        select(profiles.c.document).where(profiles.c.job_num == read_job_num(tx, job_id)).order_by(profiles.c.number)
    )
    return [ProfileView.model_validate_json(document) for document in tx.execute(query).scalars()]


def view(tx: Transaction, job_id: str, number: int) -> ProfileView:
    """One profile of a job. Raises JobNotFound, ProfileNotFound."""
    for request in views(tx, job_id):
        if request.number == number:
            return request
    raise ProfileNotFound(job_id, number)


def end(edit: JobEdit, item: Profiled) -> None:
    """Stores how a request has ended, as a supervisor reports it. Ignored unless the request is the open one."""
    request = edit.job.profile
    if request is None or request.number != item.number:
        return
    ended = {
        "state": ProfileState.FAILED if item.error else ProfileState.DONE,
        "ended_at": edit.now,
        "generation": item.generation or None,
        "reason": item.error,
        "note": item.note,
        "times": item.times,
        "files": item.files,
        "peak_bytes": item.peak_bytes,
        "overlaps": item.overlaps,
        "held_s": item.held_s,
    }
    view = _make_request_view(edit, request).model_copy(update=ended)
    _write(edit.tx, edit.job.num, view)
    edit.set(profile="")
    edit.job = replace(edit.job, profile=None)
    if item.error or not item.times:
        edit.event(ProfileFailed(number=item.number, rank=item.rank, reason=item.error or "it has no step"))
        return
    edit.event(
        ProfileTaken(
            number=item.number,
            rank=item.rank,
            first_step=item.times[0].step,
            last_step=item.times[-1].step,
            step_s=view.step_s,
            held_s=item.held_s,
        )
    )


def end_open(edit: JobEdit, reason: str) -> None:
    """Ends the open request, if there is one, without a result."""
    request = edit.job.profile
    if request is not None:
        end(edit, Profiled(generation=0, number=request.number, rank=request.rank, error=reason))


def _make_request_view(edit: JobEdit, request: ProfileRequest) -> ProfileView:
    return ProfileView(
        number=request.number,
        state=ProfileState.REQUESTED,
        rank=request.rank,
        steps=request.steps,
        requested_at=request.requested_at,
        attempt=edit.job.attempt,
    )


def _write(tx: Transaction, job_num: int, view: ProfileView) -> None:
    row = {"job_num": job_num, "number": view.number, "document": view.model_dump_json()}
    upsert(tx, profiles, [row])
