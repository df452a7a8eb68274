"""Cordons of nodes, maintenance windows, and how long drains took, as functions of an open transaction.

The jobs with workers on a node get an event about it. Called by `NodeMethods`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping

from sqlalchemy import Connection, delete, func, insert, select

from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.service import MaintenancePlanned, NodeCordoned
from shoal_service.core.nodes import Cordon
from shoal_service.fleet_views import MaintenanceWindow
from shoal_service.store import driving
from shoal_service.store.database import upsert
from shoal_service.store.errors import WindowNotFound
from shoal_service.store.records import workers_of
from shoal_service.store.tables import drain_times, jobs, maintenance_windows, node_cordons
from shoal_workers.contract.job import JobState

NUM_DRAIN_TIMES = 16
"""The newest ones are kept."""
_KEEP_S = 86_400.0
"""A window is listed for this long after its end."""


def cordon(connection: Connection, node_id: str, *, reason: str, now: float) -> None:
    """A repeated request replaces the reason."""
    upsert(connection, node_cordons, [{"node_id": node_id, "reason": reason, "requested_at": now}])
    _record(connection, {node_id}, NodeCordoned(node_id=node_id, reason=reason), now)


def uncordon(connection: Connection, node_id: str) -> bool:
    """False: the node was not cordoned."""
    return connection.execute(delete(node_cordons).where(node_cordons.c.node_id == node_id)).rowcount > 0


def cordons(connection: Connection) -> dict[str, Cordon]:
    """By node id."""
    rows = connection.execute(select(node_cordons))
    return {row.node_id: Cordon(reason=row.reason, requested_at=row.requested_at) for row in rows}


def plan_window(
    connection: Connection, nodes: Collection[str], *, begins_at: float, ends_at: float, reason: str, now: float
) -> MaintenanceWindow:
    """A new window. Those that ended a day ago are deleted."""
    connection.execute(delete(maintenance_windows).where(maintenance_windows.c.ends_at < now - _KEEP_S))
    window = MaintenanceWindow(
        window_id=f"mw-{secrets.token_hex(4)}",
        nodes=tuple(nodes),
        begins_at=begins_at,
        ends_at=ends_at,
        reason=reason,
    )
    row = {"id": window.window_id, "nodes": json.dumps(window.nodes), "begins_at": begins_at, "ends_at": ends_at}
    connection.execute(insert(maintenance_windows), row | {"reason": reason})
    event = MaintenancePlanned(window_id=window.window_id, begins_at=begins_at, ends_at=ends_at, reason=reason)
    _record(connection, set(nodes), event, now)
    return window


def cancel_window(connection: Connection, window_id: str) -> None:
    """Raises WindowNotFound."""
    if not connection.execute(delete(maintenance_windows).where(maintenance_windows.c.id == window_id)).rowcount:
        raise WindowNotFound(window_id)


def windows(connection: Connection) -> list[MaintenanceWindow]:
    """Also those that have ended, for a day; the earliest first."""
    query = select(maintenance_windows).order_by(maintenance_windows.c.begins_at, maintenance_windows.c.id)
    return [
        MaintenanceWindow(
            window_id=row.id,
            nodes=tuple(json.loads(row.nodes)),
            begins_at=row.begins_at,
            ends_at=row.ends_at,
            reason=row.reason,
        )
        for row in connection.execute(query)
    ]


def add_drain_times(connection: Connection, seconds: Mapping[str, float], *, now: float) -> None:
    """Adds the seconds that ended drains have taken, by node id."""
    rows = [{"node_id": node_id, "ended_at": now, "drain_s": drain_s} for node_id, drain_s in seconds.items()]
    if rows:
        connection.execute(insert(drain_times), rows)
        newest = connection.execute(select(func.max(drain_times.c.num))).scalar_one()
        connection.execute(delete(drain_times).where(drain_times.c.num <= newest - NUM_DRAIN_TIMES))


def read_drain_times(connection: Connection) -> list[float]:
    return list(connection.execute(select(drain_times.c.drain_s).order_by(drain_times.c.num)).scalars())


def _record(connection: Connection, nodes: Collection[str], event: JobEvent, now: float) -> None:
    """To the jobs with workers on these nodes, which are ids or addresses."""
    ended = [state.value for state in JobState if state.ended]
    query = select(jobs.c.id, jobs.c.workers).where(jobs.c.state.not_in(ended), jobs.c.workers != "[]")
    for job_id, document in connection.execute(query).all():
        if any(one.node_id in nodes or one.node_ip in nodes for one in workers_of(document)):
            driving.record_event(connection, job_id, event, now=now)
