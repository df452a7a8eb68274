"""Projects: their quotas, what they use of the cluster, and the limit of queued jobs, which is checked at submit.

A job names its project, and the project need not be defined: then the rules of the project `default` apply to the job,
and all such jobs share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from sqlalchemy import Connection, delete, func, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.market import DEFAULT_PROJECT, Project
from shoal_service.fleet_views import ProjectRules, ProjectView
from shoal_service.store.database import upsert
from shoal_service.store.errors import ProjectConflict, ProjectNotFound, QueueFull
from shoal_service.store.tables import jobs, projects
from shoal_workers.contract.job import JobState

_RULES = ("parent", "weight", "guaranteed", "limit", "max_running", "max_queued")


def defined(connection: Connection, *, lock: bool = False) -> dict[str, Project]:
    """By name; `lock`: until the transaction ends."""
    query = select(projects).order_by(projects.c.name)
    rows = connection.execute(query.with_for_update() if lock else query)
    return {row.name: Project(name=row.name, **{key: getattr(row, key) for key in _RULES}) for row in rows}


def views(connection: Connection) -> list[ProjectView]:
    """The defined projects and those that have jobs, by name, each with what it uses itself."""
    known = defined(connection)
    queued, running, workers = _usage(connection)
    total = sum(workers.values())
    names = sorted({DEFAULT_PROJECT, *known, *queued, *running})
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
    ]


def view(connection: Connection, name: str) -> ProjectView:
    """Raises ProjectNotFound: the project is neither defined nor has jobs."""
    found = next((one for one in views(connection) if one.name == name), None)
    if found is None:
        raise ProjectNotFound(name)
    return found


def put(connection: Connection, name: str, rules: ProjectRules) -> bool:
    """Replaces all rules of the project; False: it was defined before. Raises ProjectConflict."""
    known = defined(connection, lock=True)
    after = known | {name: Project(name=name, **rules.model_dump())}
    if rules.parent is not None:
        if rules.parent not in known:
            raise ProjectConflict(name, f"its parent {rules.parent} is not defined: `shoal quota set {rules.parent}`")
        if name in (above := [one.name for one in ancestors(after, rules.parent)]):
            raise ProjectConflict(name, f"it would be above itself: {' -> '.join([name, *above])}")
    upsert(connection, projects, [{"name": name, **rules.model_dump()}])
    return name not in known


def remove(connection: Connection, name: str) -> None:
    """The rules of `default` then apply to its jobs. Raises ProjectNotFound, ProjectConflict: it is a parent."""
    known = defined(connection, lock=True)
    if name not in known:
        raise ProjectNotFound(name)
    below = [one.name for one in known.values() if one.parent == name]
    if below:
        raise ProjectConflict(name, f"it is the parent of {', '.join(below)}: delete or move those first")
    connection.execute(delete(projects).where(projects.c.name == name))


def require_room_in_queue(connection: Connection, name: str) -> None:
    """To be called after the job was inserted. Raises QueueFull: a project has more queued jobs than `max_queued`."""
    known = defined(connection)
    above = list(ancestors(known, name if name in known else DEFAULT_PROJECT))
    if all(one.max_queued is None for one in above):
        return
    defined(connection, lock=True)  # two submissions at the same time count one after the other
    queued: Counter[str] = Counter()
    for project, count in _counts(connection, [JobState.QUEUED]):
        for one in ancestors(known, project if project in known else DEFAULT_PROJECT):
            queued[one.name] += count
    for one in above:
        if one.max_queued is not None and queued[one.name] > one.max_queued:
            raise QueueFull(one.name, queued[one.name] - 1, one.max_queued)


def ancestors(known: Mapping[str, Project], name: str) -> Iterator[Project]:
    """The project itself, its parent, and so on, up to the first that occurs twice."""
    seen: set[str] = set()
    while name in known and name not in seen:
        seen.add(name)
        yield known[name]
        name = known[name].parent or ""


def _usage(connection: Connection) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Queued jobs, jobs with an attempt, and workers that these were granted, by project."""
    queued: Counter[str] = Counter(dict(_counts(connection, [JobState.QUEUED])))
    running: Counter[str] = Counter(dict(_counts(connection, ATTEMPT_STATES)))
    query = (
        select(jobs.c.project, func.sum(jobs.c.granted_workers))
        .where(jobs.c.state.in_(sorted(state.value for state in ATTEMPT_STATES)))
        .group_by(jobs.c.project)
    )
    workers: Counter[str] = Counter({row[0]: int(row[1]) for row in connection.execute(query)})
    return queued, running, workers


def _counts(connection: Connection, states: frozenset[JobState] | list[JobState]) -> list[tuple[str, int]]:
    query = (
        select(jobs.c.project, func.count())
        .where(jobs.c.state.in_(sorted(state.value for state in states)))
        .group_by(jobs.c.project)
    )
    return [(row[0], int(row[1])) for row in connection.execute(query)]
