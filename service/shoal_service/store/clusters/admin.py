"""ClusterAdminMethods: what operators see and change of the clusters that have joined, a part of `Store`.

A cluster is known from its first token on, before its gateway has reported. It is removed with its orders and its
tokens in one transaction: a gateway that shows one of them is refused from then on, and ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select, update

from shoal_service.access_views import TokenView
from shoal_service.core.access import BOOTSTRAP
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.nodes import Cordon
from shoal_service.store.access import tokens
from shoal_service.store.clusters.tables import clusters
from shoal_service.store.database import Database
from shoal_service.store.errors import ClusterConflict, ClusterNotFound
from shoal_service.store.hub import Hub
from shoal_service.store.tables import jobs
from shoal_workers.contract.placing import check_labels

_SPEAKS_S = 5.0
"""A gateway that has reported within this time is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEntry:
    """What operators see of a cluster that the scheduler does not tell."""

    name: str
    created_at: float
    """When its first token was made."""
    reported_at: float | None
    """Time of the gateway's newest report; None: none has come."""
    address: str
    error: str
    """Why Ray does not answer the gateway; empty: it does."""
    labels: Mapping[str, str]
    cordon: Cordon | None
    num_jobs: int
    """Jobs with an attempt there."""


class ClusterAdminMethods:
    _database: Database
    _hub: Hub

    def cluster_entries(self) -> list[ClusterEntry]:
        """By name."""
        columns = (clusters.c.name, clusters.c.created_at, clusters.c.reported_at, clusters.c.address, clusters.c.error)
        query = select(*columns, clusters.c.labels, clusters.c.cordon).order_by(clusters.c.name)
        with self._database.read() as tx:
            num_jobs = _num_jobs(tx)
            return [_entry(row, num_jobs[row.name]) for row in tx.execute(query)]

    def cordon_cluster(self, name: str, *, reason: str, now: float) -> None:
        """No worker is added on its nodes. A repeated request replaces the reason. Raises ClusterNotFound."""
        self._change(name, cordon=json.dumps({"reason": reason, "requested_at": now}))

    def uncordon_cluster(self, name: str) -> None:
        """Idempotent. Raises ClusterNotFound."""
        self._change(name, cordon="")

    def label_cluster(self, name: str, changes: Mapping[str, str | None]) -> None:
        """Merges labels by name; None removes one. Raises ClusterNotFound; ValueError: no node can have such a label,
        or there would be too many."""
        with self._database.write() as tx:
            row = tx.execute(select(clusters.c.labels).where(clusters.c.name == name).with_for_update()).one_or_none()
            if row is None:
                raise ClusterNotFound(name)
            both = {**json.loads(row.labels), **changes}
            labels = check_labels({key: value for key, value in both.items() if value is not None})
            tx.execute(update(clusters).where(clusters.c.name == name).values(labels=json.dumps(labels)))
        self._hub.publish(f"cluster {name}", is_request=True)

    def remove_cluster(self, name: str, *, force: bool = False, now: float) -> None:
        """Forgets a cluster with its orders, and revokes its tokens.

        Args:
            force: although jobs have attempts there. Only once its gateway is gone.

        Raises:
            ClusterNotFound
            ClusterConflict: jobs have attempts there, or this service provides its gateway. The message names the way
                out.
        """
        with self._database.write() as tx:
            row = tx.execute(select(clusters).where(clusters.c.name == name).with_for_update()).one_or_none()
            if row is None:
                raise ClusterNotFound(name)
            speaks = bool(row.life) and abs(now - row.reported_at) < _SPEAKS_S
            number = _num_jobs(tx)[name]
            known = [one for one in tokens.listed(tx) if one.cluster == name and one.revoked_at is None]
            speaker = next((one for one in known if one.id == row.token_id), None)
            why = _why_kept(name, number, speaks=speaks, force=force, speaker=speaker)
            if why:
                raise ClusterConflict(name, why)
            tx.execute(delete(clusters).where(clusters.c.name == name))
            for one in known:
                tokens.revoke(tx, one.id, now=now)
        self._hub.publish(f"cluster {name}", is_request=True)

    def cluster_tokens(self, name: str) -> list[TokenView]:
        """Tokens of the cluster's gateway, newest first, with those that have ended. Raises ClusterNotFound."""
        with self._database.read() as tx:
            found = [one for one in tokens.listed(tx) if one.cluster == name]
            if not found and not tx.execute(select(clusters.c.name).where(clusters.c.name == name)).first():
                raise ClusterNotFound(name)
            return found

    def _change(self, name: str, **columns: Any) -> None:
        with self._database.write() as tx:
            if not tx.execute(update(clusters).where(clusters.c.name == name).values(columns)).rowcount:
                raise ClusterNotFound(name)
        self._hub.publish(f"cluster {name}", is_request=True)


def _why_kept(name: str, number: int, *, speaks: bool, force: bool, speaker: TokenView | None) -> str:
    """Why the cluster is not removed, with the way out; empty: it is."""
    if speaks and speaker is not None and speaker.created_by == BOOTSTRAP:
        return (
            "its gateway shows a token of this service's own state directory or settings. End that gateway first: it "
            "is the one of `shoal serve` itself, or reads the file of the setting cluster_token_file"
        )
    have = f"{number} job has an attempt" if number == 1 else f"{number} jobs have attempts"
    if number and not force:
        return (
            f"{have} there. Move them (`shoal move JOB --to CLUSTER`), or pause or cancel them. If the cluster is gone "
            f"for good: `shoal clusters remove {name} --force`"
        )
    if number and speaks:
        return f"{have} there, and its gateway reports. End its `shoal join` first, or move the jobs"
    return ""


def _num_jobs(connection: Connection) -> Counter[str]:
    """By the cluster of their attempt. Attempts of the release before, which knew one cluster, are of the oldest."""
    with_attempt = [state.value for state in ATTEMPT_STATES]
    query = select(jobs.c.cluster, func.count()).where(jobs.c.state.in_(with_attempt)).group_by(jobs.c.cluster)
    found = Counter({row[0]: row[1] for row in connection.execute(query)})
    if "" in found:
        oldest = select(clusters.c.name).order_by(clusters.c.created_at, clusters.c.name).limit(1)
        found[connection.execute(oldest).scalar_one_or_none() or ""] += found.pop("")
    return found


def _entry(row: Row[*tuple[Any, ...]], num_jobs: int) -> ClusterEntry:
    return ClusterEntry(
        name=row.name,
        created_at=row.created_at,
        reported_at=row.reported_at or None,
        address=row.address,
        error=row.error,
        labels=json.loads(row.labels),
        cordon=Cordon.model_validate_json(row.cordon) if row.cordon else None,
        num_jobs=num_jobs,
    )
