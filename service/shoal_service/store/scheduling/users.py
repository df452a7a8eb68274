"""Users: their limits, what they have, and the limit of queued jobs, which is checked at submit.

A job names its user, and the user need not be defined: then the limits of the user `default` apply, to each such user
alone. Nothing here verifies who the user is.
"""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, delete, func, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.market import DEFAULT_USER, User
from shoal_service.fleet_views import UserRules, UserView
from shoal_service.store.database import upsert
from shoal_service.store.errors import QueueFull, UserNotFound
from shoal_service.store.tables import jobs, users
from shoal_workers.contract.job import JobState


def defined(connection: Connection, *, lock: bool = False) -> dict[str, User]:
    """By name; `lock`: until the transaction ends."""
    query = select(users).order_by(users.c.name)
    rows = connection.execute(query.with_for_update() if lock else query)
    return {row.name: User(name=row.name, max_running=row.max_running, max_queued=row.max_queued) for row in rows}


def views(connection: Connection) -> list[UserView]:
    """The defined users and those who have jobs in the queue or with workers, by name."""
    known = defined(connection)
    queued, running, workers = Counter[str](), Counter[str](), Counter[str]()
    query = (
        select(jobs.c.user, jobs.c.state, func.count(), func.sum(jobs.c.granted_workers))
        .where(jobs.c.state.in_(sorted(state.value for state in (JobState.QUEUED, *ATTEMPT_STATES))))
        .group_by(jobs.c.user, jobs.c.state)
    )
    for user, state, count, granted in connection.execute(query):
        (queued if state == JobState.QUEUED.value else running)[user] += int(count)
        workers[user] += int(granted)
    found = []
    for name in sorted({DEFAULT_USER, *known, *queued, *running}):
        limits = _limits(known, name)
        found.append(
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
    return found


def view(connection: Connection, name: str) -> UserView:
    """Raises UserNotFound: the user is neither defined nor has jobs."""
    found = next((one for one in views(connection) if one.name == name), None)
    if found is None:
        raise UserNotFound(name)
    return found


def put(connection: Connection, name: str, rules: UserRules) -> bool:
    """Replaces the limits of the user; False: the user was defined before."""
    is_new = name not in defined(connection, lock=True)
    upsert(connection, users, [{"name": name, **rules.model_dump()}])
    return is_new


def remove(connection: Connection, name: str) -> None:
    """The limits of `default` then apply. Raises UserNotFound."""
    if not connection.execute(delete(users).where(users.c.name == name)).rowcount:
        raise UserNotFound(name)


def require_room_in_queue(connection: Connection, name: str) -> None:
    """To be called after the job was inserted. Raises QueueFull: the user has more queued jobs than `max_queued`."""
    if _limits(defined(connection), name).max_queued is None:
        return
    most = _limits(defined(connection, lock=True), name).max_queued  # two submissions count one after the other
    query = select(func.count()).where(jobs.c.state == JobState.QUEUED.value, jobs.c.user == name)
    queued = connection.execute(query).scalar_one()
    if most is not None and queued > most:
        raise QueueFull(name, queued - 1, most, is_user=True)


def _limits(known: dict[str, User], name: str) -> User:
    return known.get(name) or known.get(DEFAULT_USER) or User(name=name)
