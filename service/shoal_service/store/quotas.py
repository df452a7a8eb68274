"""Projects and users: their limits, what they use, and the limit of queued jobs, which is checked at submit.

A job names its project and its user, and neither need be defined. Then the rules of the project `default` apply to the
job, and all such jobs share them; the limits of the user `default` apply to each such user alone. Nothing here verifies
who the user is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sqlalchemy import Select, delete, func, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.market import DEFAULT_PROJECT, DEFAULT_USER, Project, User
from shoal_service.fleet_views import ProjectRules, ProjectView, UserRules, UserView
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.errors import ProjectConflict, ProjectNotFound, QueueFull, UserNotFound
from shoal_service.store.tables import jobs, projects, users
from shoal_workers.contract.job import JobState

_RULES = ("parent", "weight", "guaranteed", "limit", "max_running", "max_queued")


def defined_projects(tx: Transaction, *, lock: bool = False) -> dict[str, Project]:
    """The defined projects by name. `lock`: until the transaction ends."""
    query = select(projects).order_by(projects.c.name)
    rows = tx.execute(query.with_for_update() if lock else query)
    return {row.name: Project(name=row.name, **{key: getattr(row, key) for key in _RULES}) for row in rows}


def project_views(tx: Transaction, visible: Collection[str] | None = None) -> list[ProjectView]:
    """The defined projects and those that have jobs, ended ones too, by name, each with what it uses itself; `visible`:
    of these alone."""
    known = defined_projects(tx)
    queued, running, workers = _usage(tx)
    total = sum(workers.values())
    names = sorted({DEFAULT_PROJECT, *known, *tx.execute(_WITH_JOBS).scalars()})
    return [
        ProjectView(
            name=name,
            is_defined=name in known,
            **{key: getattr(known.get(name) or Project(name=name), key) for key in _RULES},
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


def _usage(tx: Transaction) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Queued jobs, jobs with an attempt, and workers that these were granted, by project."""
    queued: Counter[str] = Counter(dict(_counts(tx, [JobState.QUEUED])))
    running: Counter[str] = Counter(dict(_counts(tx, ATTEMPT_STATES)))
    query = (
        select(jobs.c.project, func.sum(jobs.c.granted_workers))
        .where(jobs.c.state.in_(sorted(state.value for state in ATTEMPT_STATES)))
        .group_by(jobs.c.project)
    )
    workers: Counter[str] = Counter({row[0]: int(row[1]) for row in tx.execute(query)})
    return queued, running, workers


def _all_with_jobs() -> Select[Any]:
    """The projects of all jobs. Each is found by one look into the index: there may be a million jobs."""
    names, later = select(func.min(jobs.c.project).label("project")).cte("found", recursive=True), jobs.alias()
    following = select(func.min(later.c.project)).where(later.c.project > names.c.project).correlate(names)
    names = names.union_all(select(following.scalar_subquery()).where(names.c.project.is_not(None)))
    return select(names.c.project).where(names.c.project.is_not(None))


_WITH_JOBS = _all_with_jobs()


def _counts(tx: Transaction, states: frozenset[JobState] | list[JobState]) -> list[tuple[str, int]]:
    query = (
        select(jobs.c.project, func.count())
        .where(jobs.c.state.in_(sorted(state.value for state in states)))
        .group_by(jobs.c.project)
    )
    return [(row[0], int(row[1])) for row in tx.execute(query)]


def defined_users(tx: Transaction, *, lock: bool = False) -> dict[str, User]:
    """The defined users by name. `lock`: until the transaction ends."""
    query = select(users).order_by(users.c.name)
    rows = tx.execute(query.with_for_update() if lock else query)
    return {row.name: User(name=row.name, max_running=row.max_running, max_queued=row.max_queued) for row in rows}


def user_views(tx: Transaction) -> list[UserView]:
    """The defined users and those who have jobs in the queue or with workers, by name."""
    known = defined_users(tx)
    queued, running, workers = Counter[str](), Counter[str](), Counter[str]()
    query = (
        select(jobs.c.user, jobs.c.state, func.count(), func.sum(jobs.c.granted_workers))
        .where(jobs.c.state.in_(sorted(state.value for state in (JobState.QUEUED, *ATTEMPT_STATES))))
        .group_by(jobs.c.user, jobs.c.state)
    )
    for user, state, count, granted in tx.execute(query):
        (queued if state == JobState.QUEUED.value else running)[user] += int(count)
        workers[user] += int(granted)
    views = []
    for name in sorted({DEFAULT_USER, *known, *queued, *running}):
        limits = _limits(known, name)
        views.append(
            UserView(
                name=name,
                is_defined=name in known,
                max_running=limits.max_running,
                max_queued=limits.max_queued,
                queued=queued[name],
                running=running[name],
                workers=workers[name],
            )
        )
    return views


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


def _limits(known: dict[str, User], name: str) -> User:
    return known.get(name) or known.get(DEFAULT_USER) or User(name=name)


def _require_room_of_project(tx: Transaction, name: str) -> None:
    known = defined_projects(tx)
    above = list(ancestors(known, name if name in known else DEFAULT_PROJECT))
    if all(ancestor.max_queued is None for ancestor in above):
        return
    defined_projects(tx, lock=True)  # two submissions at the same time count one after the other
    queued: Counter[str] = Counter()
    for project, count in _counts(tx, [JobState.QUEUED]):
        for ancestor in ancestors(known, project if project in known else DEFAULT_PROJECT):
            queued[ancestor.name] += count
    for ancestor in above:
        if ancestor.max_queued is not None and queued[ancestor.name] > ancestor.max_queued:
            raise QueueFull(ancestor.name, queued[ancestor.name] - 1, ancestor.max_queued)


def _require_room_of_user(tx: Transaction, name: str) -> None:
    if _limits(defined_users(tx), name).max_queued is None:
        return
    most = _limits(defined_users(tx, lock=True), name).max_queued  # two submissions count one after the other
    query = select(func.count()).where(jobs.c.state == JobState.QUEUED.value, jobs.c.user == name)
    queued = tx.execute(query).scalar_one()
    if most is not None and queued > most:
        raise QueueFull(name, queued - 1, most, is_user=True)
