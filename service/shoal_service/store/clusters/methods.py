"""ClusterMethods: reports of gateways, and orders to them, a part of `Store`.

    write_order     the control plane with the lease; the number rises under the lock of the cluster's row, so that a
                    gateway which has seen number N has seen every lower one that was ever committed
    open_orders     a gateway: orders of the newest lease epoch without an answer
    take_report     a gateway: its report, and answers, of which the first one of each order counts
    answers_of      whoever wrote the orders

Subscribers of `orders_of(cluster)` and `reports_of(cluster)` are notified after each commit. Neither is a change of a
job, so no other subscriber is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, delete, func, select, update

from shoal_service.access_views import ClusterTokenRequest, NewToken, TokenView
from shoal_service.core.access import new_token
from shoal_service.core.gateways import Incoming, Speaker, Verdict, admit, is_of_another
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.nodes import Cordon
from shoal_service.store import lease as leases
from shoal_service.store.access import tokens
from shoal_service.store.clusters.tables import cluster_orders, clusters
from shoal_service.store.database import Database, insert
from shoal_service.store.errors import ClusterNameTaken, ClusterNotFound, GatewayRefused
from shoal_service.store.hub import Hub
from shoal_service.store.supervisors.tables import attempt_tokens
from shoal_service.store.tables import jobs, lease


def orders_of(cluster: str) -> str:
    """What `Store.subscribe` takes in place of a job's id: an order to the cluster was written or cancelled."""
    return f"orders of cluster {cluster}"


def reports_of(cluster: str) -> str:
    """The same: the cluster's gateway has reported or answered."""
    return f"reports of cluster {cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """A report as it is written. Texts are JSON."""

    sender: Incoming
    address: str
    error: str
    snapshot: str | None
    """None: as it was."""
    answers: Sequence[tuple[int, str]] = ()
    """By number of the order."""
    running: Collection[int] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Merged by name into those of the cluster with the first report of a life."""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """What is known of a cluster."""

    life: str
    report: int
    reported_at: float
    address: str
    error: str
    snapshot: str
    """Empty: there is none of this life."""
    snapshot_report: int
    """Number of the report that it came with."""


@dataclass(frozen=True, slots=True)
class KnownCluster:
    """A cluster that has joined, or for which a token was made."""

    name: str
    labels: dict[str, str]
    cordon: Cordon | None


@dataclass(frozen=True, slots=True)
class OrderRow:
    number: int
    epoch: int
    kind: str
    arguments: str


class ClusterMethods:
    _database: Database
    _hub: Hub

    def create_cluster_token(self, cluster: str, request: ClusterTokenRequest, *, by: str, now: float) -> NewToken:
        """A token for the gateway of a cluster, which then may join. Only this answer has it."""
        made = new_token()
        with self._database.write() as tx:
            _make(tx, cluster, now)
            view = tokens.create(tx, made, request.of(cluster), by=by, now=now, cluster=cluster)
        return NewToken(token=made, **dict(view))

    def adopt_cluster_token(self, cluster: str, token: str, *, by: str, now: float) -> TokenView:
        """Make a token that exists already, in a file, that of the gateway of a cluster. If its id is known, the answer
        says whose it is, and nothing changes: a revoked one stays revoked."""
        with self._database.write() as tx:
            _make(tx, cluster, now)
            return tokens.adopt(tx, token, ClusterTokenRequest().of(cluster), by=by, now=now, cluster=cluster)

    def take_report(self, cluster: str, report: StoredReport, *, now: float) -> tuple[int, tuple[int, ...]]:
        """The number of the newest report that is stored, and those of `running` that the service no longer waits for.

        Raises:
            GatewayRefused: another gateway speaks for the cluster, or the cluster was removed; nothing is stored.
            ClusterNameTaken: another Ray cluster has this name; nothing is stored.
        """
        sender = report.sender
        mine = select(clusters).where(clusters.c.name == cluster).with_for_update()
        with self._database.write() as tx:
            row = tx.execute(mine).one_or_none()
            if row is None:
                # a control plane knows for some seconds a token that another one has revoked
                if tokens.is_revoked(tx, sender.token_id):
                    raise GatewayRefused(cluster, f"The cluster {cluster!r} was removed, and its tokens with it.")
                _make(tx, cluster, now)
                row = tx.execute(mine).one()
            speaker = Speaker(row.life, row.token_id, row.report, row.reported_at, row.ray_cluster)
            if is_of_another(speaker, sender):
                speaker = replace(speaker, jobs_reported_at=_jobs_reported_at(tx, cluster))
            admission = admit(cluster, speaker, sender, now)
            if admission.verdict is Verdict.BARRED:
                raise ClusterNameTaken(cluster, admission.reason)
            if admission.verdict is Verdict.REFUSED:
                raise GatewayRefused(cluster, admission.reason)
            newest = row.report
            if admission.verdict is not Verdict.REPEATED:
                newest = sender.number
                values = {
                    "life": "" if report.is_last else sender.life,
                    "token_id": sender.token_id,
                    "report": sender.number,
                    "reported_at": now,
                    "address": report.address,
                    "error": report.error,
                    "ray_cluster": sender.ray_cluster or row.ray_cluster,
                }
                if report.snapshot is not None or admission.verdict is Verdict.NEW_LIFE:
                    values |= {"snapshot": report.snapshot or "", "snapshot_report": sender.number}
                if report.labels and admission.verdict is Verdict.NEW_LIFE:
                    values["labels"] = json.dumps({**json.loads(row.labels), **report.labels})
                tx.execute(update(clusters).where(clusters.c.name == cluster).values(values))
            for number, answer in report.answers:
                tx.execute(
                    update(cluster_orders)
                    .where(
                        cluster_orders.c.cluster == cluster,
                        cluster_orders.c.number == number,
                        cluster_orders.c.answer.is_(None),
                    )
                    .values(answer=answer, answered_at=now, arguments="")  # they may hold the token of an attempt
                )
            cancelled = _without_order(tx, cluster, report.running)
        self._hub.announce(reports_of(cluster))
        return newest, cancelled

    def open_orders(self, cluster: str, life: str, *, after: int, limit: int) -> tuple[list[OrderRow], int]:
        """Orders without an answer above a number, and the highest number that an order has had. Those of a lease that
        is over are void.

        Raises:
            GatewayRefused: another gateway speaks for the cluster.
        """
        of_cluster = cluster_orders.c.cluster == cluster
        query = (
            select(cluster_orders.c.number, cluster_orders.c.epoch, cluster_orders.c.kind, cluster_orders.c.arguments)
            .where(of_cluster, cluster_orders.c.number > after, cluster_orders.c.answer.is_(None))
            .where(cluster_orders.c.epoch == select(lease.c.epoch).scalar_subquery())
            .order_by(cluster_orders.c.number)
            .limit(limit)
        )
        with self._database.read() as tx:
            row = tx.execute(
                select(clusters.c.life, clusters.c.last_order).where(clusters.c.name == cluster)
            ).one_or_none()
            if row is None or row.life != life:
                raise GatewayRefused(cluster, f"Another gateway speaks for the cluster {cluster!r} now.")
            found = [OrderRow(one.number, one.epoch, one.kind, one.arguments) for one in tx.execute(query)]
            return found, row.last_order

    def may_read_archive(self, cluster: str, sha256: str) -> bool:
        """An order without an answer names this code archive."""
        query = select(cluster_orders.c.number).where(
            cluster_orders.c.cluster == cluster, cluster_orders.c.archive == sha256, cluster_orders.c.answer.is_(None)
        )
        with self._database.read() as tx:
            return tx.execute(query.limit(1)).first() is not None

    # --- control plane

    def known_clusters(self) -> tuple[KnownCluster, ...]:
        """By name."""
        with self._database.read() as tx:
            rows = tx.execute(select(clusters.c.name, clusters.c.labels, clusters.c.cordon).order_by(clusters.c.name))
            return tuple(
                KnownCluster(
                    row.name, json.loads(row.labels), Cordon.model_validate_json(row.cordon) if row.cordon else None
                )
                for row in rows
            )

    def cluster(self, name: str) -> ClusterRow | None:
        """None: no gateway has reported, and no token of the cluster was made."""
        with self._database.read() as tx:
            row = tx.execute(select(clusters).where(clusters.c.name == name)).one_or_none()
        if row is None:
            return None
        return ClusterRow(
            row.life, row.report, row.reported_at, row.address, row.error, row.snapshot, row.snapshot_report
        )

    def cluster_report(self, name: str) -> tuple[str, int]:
        """Life of the gateway, and number of its newest report; two that are equal say that nothing was reported."""
        with self._database.read() as tx:
            row = tx.execute(select(clusters.c.life, clusters.c.report).where(clusters.c.name == name)).one_or_none()
        return ("", 0) if row is None else (row.life, row.report)

    def write_order(
        self, cluster: str, kind: str, arguments: str, *, archive: str | None = None, epoch: int, now: float
    ) -> int:
        """Its number. Raises LeaseLost; ClusterNotFound: no gateway has joined under this name."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            row = {"epoch": epoch, "kind": kind, "arguments": arguments, "archive": archive, "created_at": now}
            raised = (
                update(clusters)
                .where(clusters.c.name == cluster)
                .values(last_order=clusters.c.last_order + 1)
                .returning(clusters.c.last_order)
            )
            number: int | None = tx.execute(raised).scalar_one_or_none()
            if number is None:
                raise ClusterNotFound(cluster)
            tx.execute(cluster_orders.insert().values(cluster=cluster, number=number, **row))
        self._hub.announce(orders_of(cluster))
        return number

    def answers_of(self, cluster: str, numbers: Collection[int]) -> dict[int, str | None]:
        """By number, of those orders that are there; None: it has no answer yet."""
        query = select(cluster_orders.c.number, cluster_orders.c.answer).where(
            cluster_orders.c.cluster == cluster, cluster_orders.c.number.in_(numbers)
        )
        with self._database.read() as tx:
            return {row.number: row.answer for row in tx.execute(query)}

    def cancel_orders(self, cluster: str, numbers: Collection[int]) -> None:
        """The service no longer waits for them. The gateway ends those that it carries out, where it can."""
        with self._database.write() as tx:
            tx.execute(
                delete(cluster_orders).where(cluster_orders.c.cluster == cluster, cluster_orders.c.number.in_(numbers))
            )
        self._hub.announce(orders_of(cluster))

    def remove_old_orders(self, cluster: str, *, before: float, epoch: int) -> int:
        """Those that were answered before that time, and those of leases that were over then; how many."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            old = (cluster_orders.c.answered_at < before) | (
                (cluster_orders.c.epoch < epoch) & (cluster_orders.c.created_at < before)
            )
            removed = tx.execute(delete(cluster_orders).where(cluster_orders.c.cluster == cluster, old))
            return removed.rowcount


def _make(tx: Connection, cluster: str, now: float) -> None:
    row = {
        "name": cluster,
        "created_at": now,
        "life": "",
        "token_id": "",
        "report": 0,
        "reported_at": 0.0,
        "address": "",
        "error": "",
        "snapshot": "",
        "snapshot_report": 0,
        "ray_cluster": "",
        "last_order": 0,
        "labels": "{}",
        "cordon": "",
    }
    tx.execute(insert(tx, clusters).values(row).on_conflict_do_nothing(index_elements=["name"]))


def _jobs_reported_at(tx: Connection, cluster: str) -> float:
    """When the supervisor of an attempt there has reported last; 0: none has."""
    query = (
        select(func.max(attempt_tokens.c.reported_at))
        .join(jobs, (jobs.c.num == attempt_tokens.c.job_num) & (jobs.c.attempt == attempt_tokens.c.attempt))
        .where(jobs.c.state.in_(sorted(state.value for state in ATTEMPT_STATES)))
        .where(jobs.c.cluster.in_([cluster, ""]))  # empty: it began before there were several
    )
    return tx.execute(query).scalar_one() or 0.0


def _without_order(tx: Connection, cluster: str, running: Collection[int]) -> tuple[int, ...]:
    if not running:
        return ()
    query = select(cluster_orders.c.number).where(
        cluster_orders.c.cluster == cluster, cluster_orders.c.number.in_(running)
    )
    return tuple(sorted({*running} - {*tx.execute(query).scalars()}))
