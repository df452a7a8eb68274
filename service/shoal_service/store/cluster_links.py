"""Clusters that have joined: what their gateways report, the orders to them, and what operators see and change.

    write_order       the control plane with the lease; the number rises under the lock of the cluster's row, so that a
                      gateway which has seen number N has seen every lower one that was ever committed
    read_open_orders  a gateway: orders of the newest lease epoch without an answer
    take_report       a gateway: its report, and answers, of which the first one of each order counts
    read_answers      the control plane that wrote the orders

Subscribers of the cluster's `Topic.ORDERS` and `Topic.REPORTS` are notified after each commit. Neither is a change of a
job, so no other subscriber is. Orders and reports are JSON texts of `shoal_service.clusters`, and are not looked into.

A cluster is known from its first token on, before its gateway has reported. It is removed with its orders and its
tokens in one transaction: a gateway that shows one of them is refused from then on, and ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Row, delete, func, select, update

from shoal_service.access_views import ClusterTokenRequest, NewToken, TokenView
from shoal_service.core.access import BOOTSTRAP
from shoal_service.core.gateways import Incoming, Speaker, Verdict, admit, is_of_another
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.nodes import Cordon
from shoal_service.store import access
from shoal_service.store.database import (
    Transaction,
    attempt_tokens,
    cluster_orders,
    clusters,
    in_states,
    insert_on_conflict,
    jobs,
    lease,
)
from shoal_service.store.errors import ClusterConflict, ClusterNameTaken, ClusterNotFound, GatewayRefused
from shoal_service.store.hub import Topic
from shoal_service.store.records import merge_patch
from shoal_workers.contract import check_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """A report as it is written. Texts are JSON."""

    sender: Incoming
    address: str
    error: str
    snapshot: str | None
    """JSON of the snapshot; None if it has not changed."""
    answers: Sequence[tuple[int, str]] = ()
    """Answers with the numbers of their orders."""
    running: Collection[int] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Merged by name into those of the cluster with the first report of a life."""
    is_last: bool = False


_SPEAKS_S = 5.0
"""A gateway that has reported within this time counts as alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEntry:
    """A cluster that has joined, or for which a token was made."""

    name: str
    created_at: float
    """When its first token was made."""
    reported_at: float | None
    """Time of the gateway's newest report; None if none has come."""
    address: str
    error: str
    """Why Ray does not answer the gateway; empty: it does."""
    labels: Mapping[str, str]
    cordon: Cordon | None


def create_token(tx: Transaction, cluster: str, request: ClusterTokenRequest, *, by: str, now: float) -> NewToken:
    """Makes a token for the gateway of a cluster, which may join with it. Only this answer has the token."""
    _insert_cluster(tx, cluster, now)
    return access.create_token(tx, request.of(cluster), by=by, now=now, cluster=cluster)


def adopt_token(tx: Transaction, cluster: str, token: str, *, by: str, now: float) -> TokenView:
    """Make a token that exists already, in a file, that of the gateway of a cluster. If its id is known, the answer
    says whose it is, and nothing changes: a revoked one stays revoked."""
    _insert_cluster(tx, cluster, now)
    return access.adopt_token(tx, token, ClusterTokenRequest().of(cluster), by=by, now=now, cluster=cluster)


def take_report(tx: Transaction, cluster: str, report: StoredReport, *, now: float) -> tuple[int, tuple[int, ...]]:
    """Stores a report. Returns the number of the newest report that is stored, and those of `running` that the service
    no longer waits for.

    Raises:
        GatewayRefused: another gateway speaks for the cluster, or the cluster was removed; nothing is stored.
        ClusterNameTaken: another Ray cluster has this name; nothing is stored.
    """
    sender = report.sender
    mine = select(clusters).where(clusters.c.name == cluster).with_for_update()
    row = tx.execute(mine).one_or_none()
    if row is None:
        # a control plane knows for some seconds a token that another one has revoked
        if access.is_revoked(tx, sender.token_id):
            raise GatewayRefused(cluster, f"The cluster {cluster!r} was removed, and its tokens with it.")
        _insert_cluster(tx, cluster, now)
        row = tx.execute(mine).one()
    speaker = Speaker(row.life, row.token_id, row.report, row.reported_at, row.ray_cluster)
    if is_of_another(speaker, sender):
        speaker = replace(speaker, jobs_reported_at=_read_newest_job_report(tx, cluster))
    admission = admit(cluster, speaker, sender, now)
    if admission.verdict is Verdict.BARRED:
        raise ClusterNameTaken(cluster, admission.reason)
    if admission.verdict is Verdict.REFUSED:
        raise GatewayRefused(cluster, admission.reason)
    newest = row.report
    if admission.verdict is not Verdict.REPEATED:
        newest = sender.number
        values = {
            "life": "" if report.is_last else sender.life,  # the next gateway need not wait until this one is silent
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
                cluster_orders.c.answer.is_(None),  # the first answer counts
            )
            .values(answer=answer, answered_at=now, arguments="")  # they may hold the token of an attempt
        )
    cancelled = _find_cancelled(tx, cluster, report.running)
    tx.announce(Topic.REPORTS.narrow_to(cluster))
    return newest, cancelled


def read_open_orders(
    tx: Transaction, cluster: str, life: str, *, after: int, limit: int
) -> tuple[list[Row[int, int, str, str]], int]:
    """Return the orders without an answer above a number, and the highest number that an order has had.

    Orders of a lease that is over are left out.

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
    row = tx.execute(select(clusters.c.life, clusters.c.last_order).where(clusters.c.name == cluster)).one_or_none()
    if row is None or row.life != life:
        raise GatewayRefused(cluster, f"Another gateway speaks for the cluster {cluster!r} now.")
    return [*tx.execute(query)], row.last_order


def may_read_archive(tx: Transaction, cluster: str, sha256: str) -> bool:
    """Return whether an order without an answer names this code archive."""
    query = select(cluster_orders.c.number).where(
        cluster_orders.c.cluster == cluster, cluster_orders.c.archive == sha256, cluster_orders.c.answer.is_(None)
    )
    return tx.execute(query.limit(1)).first() is not None


def find(tx: Transaction, name: str) -> Row[*tuple[Any, ...]] | None:
    """Read the row of a cluster; None if no gateway has reported, and no token of the cluster was made."""
    return tx.execute(select(clusters).where(clusters.c.name == name)).one_or_none()


def read_newest_report(tx: Transaction, name: str) -> tuple[str, int]:
    """Return the incarnation of the gateway and the number of its newest report."""
    row = tx.execute(select(clusters.c.life, clusters.c.report).where(clusters.c.name == name)).one_or_none()
    return ("", 0) if row is None else (row.life, row.report)


def write_order(
    tx: Transaction, cluster: str, kind: str, arguments: str, *, archive: str | None = None, now: float
) -> int:
    """Writes an order, and returns its number. Raises ClusterNotFound: no gateway has joined under this name."""
    row = {"epoch": tx.epoch, "kind": kind, "arguments": arguments, "archive": archive, "created_at": now}
    raised = (
        update(clusters)
        .where(clusters.c.name == cluster)
        .values(last_order=clusters.c.last_order + 1)
        .returning(clusters.c.last_order)
    )
    number: int = tx.require_row(raised, ClusterNotFound(cluster)).last_order
    tx.execute(cluster_orders.insert().values(cluster=cluster, number=number, **row))
    tx.announce(Topic.ORDERS.narrow_to(cluster))
    return number


def read_answers(tx: Transaction, cluster: str, numbers: Collection[int]) -> dict[int, str | None]:
    """Return the answers to these orders by number; None if an order has no answer yet. Unknown orders are left out."""
    query = select(cluster_orders.c.number, cluster_orders.c.answer).where(
        cluster_orders.c.cluster == cluster, cluster_orders.c.number.in_(numbers)
    )
    return {row.number: row.answer for row in tx.execute(query)}


def cancel_orders(tx: Transaction, cluster: str, numbers: Collection[int]) -> None:
    """Cancels orders whose answers the service no longer waits for. The gateway ends those that it carries out, where
    it can."""
    tx.execute(delete(cluster_orders).where(cluster_orders.c.cluster == cluster, cluster_orders.c.number.in_(numbers)))
    tx.announce(Topic.ORDERS.narrow_to(cluster))


def remove_old_orders(tx: Transaction, cluster: str, *, before: float) -> int:
    """Deletes the orders that were answered before that time, and those of leases that were over then. Returns their
    number."""
    old = (cluster_orders.c.answered_at < before) | (
        (cluster_orders.c.epoch < tx.epoch) & (cluster_orders.c.created_at < before)
    )
    removed = tx.execute(delete(cluster_orders).where(cluster_orders.c.cluster == cluster, old))
    return removed.rowcount


def list_clusters(tx: Transaction) -> list[ClusterEntry]:
    """List all clusters by name. The control loop calls this in each pass."""
    columns = (clusters.c.name, clusters.c.created_at, clusters.c.reported_at, clusters.c.address, clusters.c.error)
    query = select(*columns, clusters.c.labels, clusters.c.cordon).order_by(clusters.c.name)
    return [
        ClusterEntry(
            name=row.name,
            created_at=row.created_at,
            reported_at=row.reported_at or None,
            address=row.address,
            error=row.error,
            labels=json.loads(row.labels),
            cordon=Cordon.model_validate_json(row.cordon) if row.cordon else None,
        )
        for row in tx.execute(query)
    ]


def count_jobs(tx: Transaction) -> Counter[str]:
    """Count the jobs with an attempt, by cluster."""
    query = select(jobs.c.cluster, func.count()).where(in_states(ATTEMPT_STATES)).group_by(jobs.c.cluster)
    return Counter({row[0]: row[1] for row in tx.execute(query)})


def cordon(tx: Transaction, name: str, *, reason: str, now: float) -> None:
    """Cordons a cluster: no worker is added on its nodes. A repeated request replaces the reason. Raises
    ClusterNotFound."""
    _update_cluster(tx, name, cordon=json.dumps({"reason": reason, "requested_at": now}))


def uncordon(tx: Transaction, name: str) -> None:
    """Undoes `cordon`. Idempotent. Raises ClusterNotFound."""
    _update_cluster(tx, name, cordon="")


def label(tx: Transaction, name: str, changes: Mapping[str, str | None]) -> None:
    """Merges labels by name; None removes one. Raises ClusterNotFound; ValueError: no node can have such a label,
    or there would be too many."""
    query = select(clusters.c.labels).where(clusters.c.name == name).with_for_update()
    row = tx.require_row(query, ClusterNotFound(name))
    labels = check_labels(merge_patch(json.loads(row.labels), changes))
    tx.execute(update(clusters).where(clusters.c.name == name).values(labels=json.dumps(labels)))
    tx.publish(f"cluster {name}", is_request=True)


def remove(tx: Transaction, name: str, *, force: bool = False, now: float) -> None:
    """Forgets a cluster with its orders, and revokes its tokens.

    Args:
        force: although jobs have attempts there. Only once its gateway is gone.

    Raises:
        ClusterNotFound
        ClusterConflict: jobs have attempts there, or this service provides its gateway. The message names the way
            out.
    """
    row = tx.require_row(select(clusters).where(clusters.c.name == name).with_for_update(), ClusterNotFound(name))
    speaks = bool(row.life) and abs(now - row.reported_at) < _SPEAKS_S
    number = count_jobs(tx)[name]
    known = [token for token in access.list_tokens(tx) if token.cluster == name and token.revoked_at is None]
    speaker = next((token for token in known if token.id == row.token_id), None)
    why = _explain_refusal(name, number, speaks=speaks, force=force, speaker=speaker)
    if why:
        raise ClusterConflict(name, why)
    tx.execute(delete(clusters).where(clusters.c.name == name))
    for token in known:  # a gateway that is refused for its token ends
        access.revoke_token(tx, token.id, now=now)
    tx.publish(f"cluster {name}", is_request=True)


def list_tokens(tx: Transaction, name: str) -> list[TokenView]:
    """List the tokens of the cluster's gateway, newest first, with those that have ended. Raises ClusterNotFound."""
    tokens = [token for token in access.list_tokens(tx) if token.cluster == name]
    if not tokens and not tx.execute(select(clusters.c.name).where(clusters.c.name == name)).first():
        raise ClusterNotFound(name)
    return tokens


def _update_cluster(tx: Transaction, name: str, **columns: Any) -> None:
    if not tx.execute(update(clusters).where(clusters.c.name == name).values(columns)).rowcount:
        raise ClusterNotFound(name)
    tx.publish(f"cluster {name}", is_request=True)


def _insert_cluster(tx: Transaction, cluster: str, now: float) -> None:
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
    tx.execute(insert_on_conflict(tx, clusters).values(row).on_conflict_do_nothing(index_elements=["name"]))


def _read_newest_job_report(tx: Transaction, cluster: str) -> float:
    """Return when the supervisor of an attempt in the cluster has reported last; 0 if none has."""
    query = (
        select(func.max(attempt_tokens.c.reported_at))
        .join(jobs, (jobs.c.num == attempt_tokens.c.job_num) & (jobs.c.attempt == attempt_tokens.c.attempt))
        .where(in_states(ATTEMPT_STATES))
        .where(jobs.c.cluster.in_([cluster, ""]))  # empty: it began before there were several
    )
    return tx.execute(query).scalar_one() or 0.0


def _find_cancelled(tx: Transaction, cluster: str, running: Collection[int]) -> tuple[int, ...]:
    if not running:
        return ()
    query = select(cluster_orders.c.number).where(
        cluster_orders.c.cluster == cluster, cluster_orders.c.number.in_(running)
    )
    return tuple(sorted({*running} - {*tx.execute(query).scalars()}))


def _explain_refusal(name: str, number: int, *, speaks: bool, force: bool, speaker: TokenView | None) -> str:
    """Return why the cluster is not removed, with the way out; empty if it is removed."""
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
