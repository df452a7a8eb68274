"""Why jobs wait: the order of the queue, and why running jobs have fewer workers than they may have.

Both are explained by the scheduler's last pass, and stored so that every server can answer. The place of a job is
deleted when it leaves the queue (`JobEdit.move`).

A change of the spec is a request, so it is answered with an event if the job is held back then. The row of a job
remembers which version was answered, and outlives its attempts. It is shown as long as the job has the grant that the
answer is about.

Projects and users: their limits, what they use, and the limit of queued jobs, which is checked at submit.

A job names its project and its user, and neither need be defined. Then the rules of the project `default` apply to the
job, and all such jobs share them; the limits of the user `default` apply to each such user alone. Nothing here verifies
who the user is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Column, Row, Select, Table, and_, bindparam, delete, func, select

from shoal_service.core.events import JobHeldBack
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.core.scheduling.market import DEFAULT_PROJECT, DEFAULT_USER, Project, User, Wait
from shoal_service.fleet_views import HeldBackJob, ProjectRules, ProjectView, QueuedJob, QueueView, UserRules, UserView
from shoal_service.store import driving
from shoal_service.store.database import (
    Transaction,
    growth_answers,
    in_projects,
    in_states,
    jobs,
    projects,
    queue_places,
    upsert,
    users,
)
from shoal_service.store.errors import ProjectConflict, ProjectNotFound, QueueFull, UserNotFound
from shoal_service.store.records import GROWTH_COLUMNS, PLACE_COLUMNS, make_growth_answer, make_queue_place
from shoal_workers.contract import JobState

T = TypeVar("T")
_MAX_HOLDERS = 16
MOST_PLACED = 5_000
"""Places that one transaction writes: with each start and end of a job, all those behind it move."""
_SAME_START_S = 5.0
_SAME_START_SHARE = 0.2
"""An expected start that differs by less than this, relative to the time until then, is not written again: people read
a time that wanders with each step of the jobs before it as no time at all. One that has passed is written."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the stored order."""

    placed: Sequence[dict[str, Any]]
    """New rows: first those of jobs without a place, then those that were not written for longest."""
    num_left: int
    """Number of new rows beyond these."""
    gone: Sequence[int]
    """Numbers of the jobs that no longer have a place."""


def differing(tx: Transaction, waits: Sequence[Wait], *, now: float, most: int = MOST_PLACED) -> Changes:
    """Compares the order of a pass, which may be empty, with the stored one. Jobs that are not queued are left out.
    `most`: new rows. It is read before the transaction of `save_places`, so others wait only for the rows: nobody else
    writes places during the same epoch."""
    known = {job_id: row for job_id, *row in tx.execute(_PLACES)}
    holders: dict[tuple[str, ...], str] = {}
    placed = []
    for wait in waits:
        if (row := known.pop(wait.job_id, None)) is None:
            continue  # it has left the queue
        if (text := holders.get(wait.holders)) is None:
            text = holders[wait.holders] = json.dumps(wait.holders[:_MAX_HOLDERS])
        num, position, reason, held_by, expected_at, decided_at = row
        if (position, reason, held_by) == (wait.position, wait.reason, text) and _is_same(
            expected_at, wait.expected_at, now
        ):
            continue
        new = {
            "job_num": num,
            "position": wait.position,
            "reason": wait.reason,
            "holders": text,
            "expected_at": wait.expected_at,
            "decided_at": now,
        }
        placed.append((decided_at or 0.0, wait.position, new))
    gone = [row[0] for row in known.values() if row[1] is not None]
    gone += tx.execute(_LEFT).scalars()
    placed.sort(key=itemgetter(0, 1))
    return Changes([new for _, _, new in placed[:most]], max(0, len(placed) - most), gone)


def save_places(tx: Transaction, changes: Changes) -> None:
    """Stores each job's place. It notifies nobody, since the order may change with every pass. Places of jobs that
    have left the queue since `differing` are not written."""
    if not (changes.placed or changes.gone):
        return
    nums = set(tx.execute(_QUEUED_NUMS).scalars()) if changes.placed else set()
    placed = [row for row in changes.placed if row["job_num"] in nums]
    if changes.gone:
        gone = [{"gone": num} for num in changes.gone]
        tx.execute(delete(queue_places).where(queue_places.c.job_num == bindparam("gone")), gone)
    upsert(tx, queue_places, placed)


_QUEUED_NUMS = select(jobs.c.num).where(jobs.c.state == JobState.QUEUED.value)
_LEFT = (
    select(queue_places.c.job_num)
    .join(jobs, jobs.c.num == queue_places.c.job_num)
    .where(jobs.c.state != JobState.QUEUED.value)
)
"""On PostgreSQL a job may leave the queue while its place is written."""
_PLACES = (
    select(
        *(jobs.c.id, jobs.c.num),
        *(queue_places.c.position, queue_places.c.reason, queue_places.c.holders),
        *(queue_places.c.expected_at, queue_places.c.decided_at),
    )
    .outerjoin(queue_places, queue_places.c.job_num == jobs.c.num)
    .where(jobs.c.state == JobState.QUEUED.value)
)


def view(tx: Transaction, *, limit: int = 1000, visible: Collection[str] | None = None) -> QueueView:
    """The queue in its order; jobs that no pass has considered yet come last. `visible`: only jobs of these projects,
    and no ids of others."""
    is_shown = and_(jobs.c.state == JobState.QUEUED.value, in_projects(jobs.c.project, visible))
    query = (
        select(jobs.c.id, jobs.c.name, jobs.c.project, jobs.c.user, jobs.c.priority, jobs.c.created_at, *PLACE_COLUMNS)
        .outerjoin(queue_places, queue_places.c.job_num == jobs.c.num)
        .where(is_shown)
        .order_by(queue_places.c.position.is_(None), queue_places.c.position, jobs.c.priority.desc(), jobs.c.num)
        .limit(limit)
    )
    items = tuple(
        QueuedJob(
            job_id=row.id,
            name=row.name,
            project=row.project,
            user=row.user,
            priority=row.priority,
            submitted_at=row.created_at,
            place=make_queue_place(row),
        )
        for row in tx.execute(query)
    )
    return QueueView(
        items=items if visible is None else _without_others(tx, items, visible),
        num_queued=tx.execute(select(func.count()).where(is_shown)).scalar_one(),
        projects=tuple(project_views(tx, visible)),
        held_back=tuple(
            project for project in _list_held_back(tx, limit=limit) if visible is None or project.project in visible
        ),
    )


def _without_others(tx: Transaction, items: tuple[QueuedJob, ...], visible: Collection[str]) -> tuple[QueuedJob, ...]:
    """Leaves out the ids of holders that are jobs of other projects."""
    named = {holder for item in items if item.place is not None for holder in item.place.holders}
    known = select(jobs.c.id).where(jobs.c.id.in_(sorted(named)), jobs.c.project.in_(sorted(visible)))
    own = set(tx.execute(known).scalars())
    queue = []
    for item in items:
        if item.place is not None:
            holders = tuple(holder for holder in item.place.holders if holder in own)
            item = item.model_copy(update={"place": item.place.model_copy(update={"holders": holders})})
        queue.append(item)
    return tuple(queue)


def _is_same(before: float | None, after: float | None, now: float) -> bool:
    if before is None or after is None:
        return before is after
    return now <= before and abs(after - before) <= max(_SAME_START_S, _SAME_START_SHARE * (after - now))


REWRITE_S = 10.0
"""Words that differ only in their numbers are written again after this time."""
_NOTHING = {"limit": "", "reason": ""}


def save_growth(tx: Transaction, answers: Sequence[HeldBack], versions: Mapping[str, int], *, now: float) -> int:
    """Stores why running jobs are held back, as a pass explained it. A job whose spec has changed since the last answer
    gets an event if it is held back. Returns the number of rows that were written.

    Args:
        answers: for the jobs that are held back.
        versions: the version of the spec that the scheduler has considered, of each running job.
    """
    held = {answer.job_id: answer for answer in answers}
    written = []
    for row in tx.execute(_select_running()).all():
        version = versions.get(row.id)
        if version is None:
            continue  # it has started since
        after = _make_row(row, held.get(row.id), version, now)
        if after is None or not _differs(row, after, now):
            continue
        written.append(after)
        answer = held.get(row.id)
        if answer is not None and after["spec_version"] > max(1, row.answered_version or 1):
            event = JobHeldBack(
                workers=answer.workers, max_workers=answer.max_workers, limit=answer.limit.value, reason=answer.reason
            )
            driving.record_event(tx, row.id, event, now=now)
    upsert(tx, growth_answers, written)
    return len(written)


def _list_held_back(tx: Transaction, *, limit: int) -> tuple[HeldBackJob, ...]:
    """The running jobs that are held back, oldest first."""
    rows = tx.execute(_select_running().where(growth_answers.c.limit != ""))
    answered = ((row, make_growth_answer(row)) for row in rows)
    held = [
        HeldBackJob(
            job_id=row.id,
            name=row.name,
            project=row.project,
            user=row.user,
            priority=row.priority,
            workers=row.granted_workers,
            answer=answer,
        )
        for row, answer in answered
        if answer is not None
    ]
    return tuple(held[:limit])


def _select_running() -> Any:
    columns = (jobs.c.num, jobs.c.id, jobs.c.name, jobs.c.project, jobs.c.user, jobs.c.priority, jobs.c.granted_workers)
    return (
        select(*columns, growth_answers.c.spec_version.label("answered_version"), *GROWTH_COLUMNS)
        .outerjoin(growth_answers, growth_answers.c.job_num == jobs.c.num)
        .where(in_states(ATTEMPT_STATES))
        .order_by(jobs.c.num)
    )


def _make_row(row: Row[Any], answer: HeldBack | None, version: int, now: float) -> dict[str, Any] | None:
    """The row of a job; None if there is nothing to remember of a job whose spec was never changed."""
    if answer is None and version == 1 and row.answered_version is None:
        return None
    if answer is not None and answer.limit is GrowthLimit.SOON:
        version = row.answered_version or 1  # no answer yet to what was changed
    message = _NOTHING if answer is None else {"limit": answer.limit.value, "reason": answer.reason}
    return {
        "job_num": row.num,
        "spec_version": version,
        "workers": row.granted_workers if answer is None else answer.workers,
        "max_workers": row.granted_workers if answer is None else answer.max_workers,
        **message,
        "decided_at": now,
    }


def _differs(row: Row[Any], after: Mapping[str, Any], now: float) -> bool:
    if row.answered_version is None:
        return True
    before = (row.answered_version, row.answered_workers, row.max_workers, row.growth_limit)
    if before != (after["spec_version"], after["workers"], after["max_workers"], after["limit"]):
        return True
    return bool(row.growth_reason != after["reason"] and not 0 <= now - row.growth_decided_at < REWRITE_S)


def defined_projects(tx: Transaction, *, lock: bool = False) -> dict[str, Project]:
    """Read the projects by name, as the market needs them. `lock`: until the transaction ends."""
    return _read_defined(tx, projects, Project, lock=lock)


def _read_defined(tx: Transaction, table: Table, model: Callable[..., T], *, lock: bool) -> dict[str, T]:
    query = select(table).order_by(table.c.name)
    return {row.name: model(**row._asdict()) for row in tx.execute(query.with_for_update() if lock else query)}


def project_views(tx: Transaction, visible: Collection[str] | None = None) -> list[ProjectView]:
    """The defined projects and those that have jobs, ended ones too, by name, each with what it uses itself; `visible`:
    of these alone."""
    known = defined_projects(tx)
    queued, running, workers = _count_usage(tx, _OF_PROJECTS)
    total = sum(workers.values())
    names = sorted({DEFAULT_PROJECT, *known, *tx.execute(_WITH_JOBS).scalars()})
    return [
        ProjectView(
            **asdict(known.get(name) or Project(name=name)),
            is_defined=name in known,
            queued=queued[name],
            running=running[name],
            workers=workers[name],
            share=workers[name] / total if total else 0.0,
        )
        for name in names
        if visible is None or name in visible
    ]


def project_view(tx: Transaction, name: str) -> ProjectView:
    """One project. Raises ProjectNotFound: the project is neither defined nor has jobs."""
    project = next((view for view in project_views(tx) if view.name == name), None)
    if project is None:
        raise ProjectNotFound(name)
    return project


def put_project(tx: Transaction, name: str, rules: ProjectRules) -> tuple[ProjectView, bool]:
    """Replaces all rules of the project. Returns it, and whether it is new. Raises ProjectConflict."""
    known = defined_projects(tx, lock=True)
    _require_possible(known, name, rules)
    upsert(tx, projects, [{"name": name, **rules.model_dump()}])
    tx.publish(f"project {name}", is_request=True)
    return project_view(tx, name), name not in known


def _require_possible(known: Mapping[str, Project], name: str, rules: ProjectRules) -> None:
    after = {**known, name: Project(name=name, **rules.model_dump())}
    if rules.parent is not None:
        if rules.parent not in known:
            raise ProjectConflict(name, f"its parent {rules.parent} is not defined: `shoal quota set {rules.parent}`")
        if name in (above := [ancestor.name for ancestor in ancestors(after, rules.parent)]):
            raise ProjectConflict(name, f"it would be above itself: {' -> '.join([name, *above])}")


def remove_project(tx: Transaction, name: str) -> None:
    """Removes the rules of the project. The rules of `default` then apply to its jobs. Raises ProjectNotFound,
    ProjectConflict: it is a parent."""
    known = defined_projects(tx, lock=True)
    if name not in known:
        raise ProjectNotFound(name)
    below = [quota.name for quota in known.values() if quota.parent == name]
    if below:
        raise ProjectConflict(name, f"it is the parent of {', '.join(below)}: delete or move those first")
    tx.execute(delete(projects).where(projects.c.name == name))
    tx.publish(f"project {name}", is_request=True)


def require_room_in_queue(tx: Transaction, project: str, user: str) -> None:
    """Checks the limit of queued jobs, after the job was inserted. Raises QueueFull: the project, one above it, or the
    user has more queued jobs than its `max_queued`."""
    _require_room_of_project(tx, project)
    _require_room_of_user(tx, user)


def ancestors(known: Mapping[str, Project], name: str) -> Iterator[Project]:
    """The project itself, its parent, and so on, up to the first that occurs twice."""
    seen: set[str] = set()
    while name in known and name not in seen:
        seen.add(name)
        yield known[name]
        name = known[name].parent or ""


def _count_usage(tx: Transaction, query: Select[Any]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Queued jobs, jobs with an attempt, and workers that these were granted, by project or user."""
    queued, running, workers = Counter[str](), Counter[str](), Counter[str]()
    for name, state, count, granted in tx.execute(query):
        (queued if state == JobState.QUEUED.value else running)[name] += int(count)
        workers[name] += int(granted)
    return queued, running, workers


def _select_usage(column: Column[str]) -> Select[Any]:
    return (
        select(column, jobs.c.state, func.count(), func.sum(jobs.c.granted_workers))
        .where(in_states((JobState.QUEUED, *ATTEMPT_STATES)))
        .group_by(column, jobs.c.state)
    )


_OF_PROJECTS, _OF_USERS = _select_usage(jobs.c.project), _select_usage(jobs.c.user)


def _all_with_jobs() -> Select[Any]:
    """The projects of all jobs. Each is found by one look into the index: there may be a million jobs."""
    names, later = select(func.min(jobs.c.project).label("project")).cte("found", recursive=True), jobs.alias()
    following = select(func.min(later.c.project)).where(later.c.project > names.c.project).correlate(names)
    names = names.union_all(select(following.scalar_subquery()).where(names.c.project.is_not(None)))
    return select(names.c.project).where(names.c.project.is_not(None))


_WITH_JOBS = _all_with_jobs()


def defined_users(tx: Transaction, *, lock: bool = False) -> dict[str, User]:
    """Read the defined users by name. `lock`: until the transaction ends."""
    return _read_defined(tx, users, User, lock=lock)


def user_views(tx: Transaction) -> list[UserView]:
    """The defined users and those who have jobs in the queue or with workers, by name."""
    known = defined_users(tx)
    queued, running, workers = _count_usage(tx, _OF_USERS)
    return [
        UserView(
            name=name,
            is_defined=name in known,
            max_running=_find_limits(known, name).max_running,
            max_queued=_find_limits(known, name).max_queued,
            queued=queued[name],
            running=running[name],
            workers=workers[name],
        )
        for name in sorted({DEFAULT_USER, *known, *queued, *running})
    ]


def user_view(tx: Transaction, name: str) -> UserView:
    """One user. Raises UserNotFound: the user is neither defined nor has jobs."""
    user = next((view for view in user_views(tx) if view.name == name), None)
    if user is None:
        raise UserNotFound(name)
    return user


def put_user(tx: Transaction, name: str, rules: UserRules) -> tuple[UserView, bool]:
    """Replaces the limits of the user. Returns the user, and whether the user is new."""
    is_new = name not in defined_users(tx, lock=True)
    upsert(tx, users, [{"name": name, **rules.model_dump()}])
    tx.publish(f"user {name}", is_request=True)
    return user_view(tx, name), is_new


def remove_user(tx: Transaction, name: str) -> None:
    """Removes the limits of the user. The limits of `default` then apply. Raises UserNotFound."""
    if not tx.execute(delete(users).where(users.c.name == name)).rowcount:
        raise UserNotFound(name)
    tx.publish(f"user {name}", is_request=True)


def _find_limits(known: dict[str, User], name: str) -> User:
    return known.get(name) or known.get(DEFAULT_USER) or User(name=name)


def _require_room_of_project(tx: Transaction, name: str) -> None:
    known = defined_projects(tx)
    above = list(ancestors(known, name if name in known else DEFAULT_PROJECT))
    if all(ancestor.max_queued is None for ancestor in above):
        return
    defined_projects(tx, lock=True)  # two submissions at the same time count one after the other
    queued: Counter[str] = Counter()
    for project, count in _count_usage(tx, _OF_PROJECTS)[0].items():
        for ancestor in ancestors(known, project if project in known else DEFAULT_PROJECT):
            queued[ancestor.name] += count
    for ancestor in above:
        if ancestor.max_queued is not None and queued[ancestor.name] > ancestor.max_queued:
            raise QueueFull(ancestor.name, queued[ancestor.name] - 1, ancestor.max_queued)


def _require_room_of_user(tx: Transaction, name: str) -> None:
    if _find_limits(defined_users(tx), name).max_queued is None:
        return
    most = _find_limits(defined_users(tx, lock=True), name).max_queued  # two submissions count one after the other
    query = select(func.count()).where(jobs.c.state == JobState.QUEUED.value, jobs.c.user == name)
    queued = tx.execute(query).scalar_one()
    if most is not None and queued > most:
        raise QueueFull(name, queued - 1, most, is_user=True)
