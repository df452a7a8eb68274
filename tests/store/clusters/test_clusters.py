"""Reports of gateways and orders to them, on both databases."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.access_views import ClusterTokenRequest
from shoal_service.core.access import Role, hash_secret, new_attempt_token
from shoal_service.core.gateways import JOBS_SILENT_S, Incoming
from shoal_service.home import AttemptCaller, HomeReport
from shoal_service.reports import SupervisorReports
from shoal_service.store import Lease, Store, access, cluster_links, driving, supervisor_links
from shoal_service.store.cluster_links import StoredReport
from shoal_service.store.errors import ClusterNameTaken, ClusterNotFound, GatewayRefused, LeaseLost
from shoal_service.store.hub import Topic
from shoal_service.store.supervisor_links import ReceivedReport
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState

A, B = "a" * 16, "b" * 16


def report(store: Store, life: str = A, number: int = 1, *, now: float = 10.0, **changes: Any) -> Any:
    sender = Incoming(
        life,
        changes.pop("token_id", "token-1"),
        number,
        changes.pop("takes_over", False),
        changes.pop("ray_cluster", ""),
        changes.pop("replaces", False),
    )
    known = {"address": "head:6379", "error": "", "snapshot": '{"nodes":[]}', **changes}
    return store.writing(cluster_links.take_report)("east", StoredReport(sender=sender, **known), now=now)


def order(store: Store, lease: Lease, kind: str = "Reap", **changes: Any) -> int:
    return store.writing(cluster_links.write_order, lease.epoch)("east", kind, "{}", now=10.0, **changes)


def numbers(store: Store, life: str = A, after: int = 0) -> list[int]:
    return [
        one.number for one in store.reading(cluster_links.read_open_orders)("east", life, after=after, limit=100)[0]
    ]


def test_the_newest_report_counts_and_a_snapshot_stays_until_the_next_one(store: Store) -> None:
    assert store.reading(cluster_links.find)("east") is None
    assert report(store) == (1, ())
    assert report(store, number=3, snapshot=None, error="the head is away") == (3, ())
    assert report(store, number=2, snapshot='{"nodes":[1]}') == (3, ()), "a report that a later one has overtaken"
    row = store.reading(cluster_links.find)("east")
    assert row is not None
    assert (row.life, row.report, row.snapshot, row.snapshot_report) == (A, 3, '{"nodes":[]}', 1)
    assert row.error == "the head is away"
    report(store, B, takes_over=True, snapshot=None)
    row = store.reading(cluster_links.find)("east")
    assert row is not None and (row.life, row.snapshot) == (B, ""), "the snapshot of another life is not its own"


def test_the_reports_of_a_gateway_that_another_one_has_followed_change_nothing(store: Store, lease: Lease) -> None:
    report(store)
    number = order(store, lease)
    report(store, B, takes_over=True)
    with pytest.raises(GatewayRefused, match="Another gateway speaks"):
        report(store, A, 2, answers=[(number, '"late"')])
    with pytest.raises(GatewayRefused):
        numbers(store, A)
    assert store.reading(cluster_links.read_answers)("east", [number]) == {number: None}
    assert numbers(store, B) == [number], "an order without an answer is given to the next gateway"


def test_a_gateway_that_ends_in_order_leaves_its_place_at_once(store: Store) -> None:
    report(store)
    with pytest.raises(GatewayRefused):
        report(store, B, token_id="token-2")
    report(store, A, 2, is_last=True)
    report(store, B, token_id="token-2")


def test_an_order_is_answered_once_and_its_number_rises(store: Store, lease: Lease) -> None:
    report(store)
    first, second = order(store, lease), order(store, lease)
    assert second > first and numbers(store) == [first, second] and numbers(store, after=first) == [second]
    report(store, number=2, answers=[(first, '"done"')])
    report(store, number=3, answers=[(first, '"again"'), (999, '"nobody has asked"')])
    assert store.reading(cluster_links.read_answers)("east", [first, second, 999]) == {first: '"done"', second: None}
    assert numbers(store) == [second]
    store.writing(cluster_links.cancel_orders)("east", [second])
    assert report(store, number=4, running=[first, second]) == (4, (second,))
    assert order(store, lease) > second, "the number of a cancelled order is not used again"


def test_orders_of_a_lease_that_is_over_are_void(store: Store, lease: Lease) -> None:
    report(store)
    old = order(store, lease)
    store.release_lease(lease.owner)
    newer = store.acquire_lease("owner-2", ttl_s=1e9, now=20.0)
    assert newer is not None and newer.epoch > lease.epoch
    with pytest.raises(LeaseLost):
        order(store, lease)
    assert numbers(store) == []
    number = order(store, newer)
    assert numbers(store) == [number]
    assert store.writing(cluster_links.remove_old_orders, newer.epoch)("east", before=15.0) == 1
    assert store.reading(cluster_links.read_answers)("east", [old, number]) == {number: None}


def test_answered_orders_are_removed_after_a_while(store: Store, lease: Lease) -> None:
    report(store)
    first, second = order(store, lease), order(store, lease)
    report(store, number=2, answers=[(first, "1")], now=20.0)
    assert store.writing(cluster_links.remove_old_orders, lease.epoch)("east", before=20.0) == 0
    assert store.writing(cluster_links.remove_old_orders, lease.epoch)("east", before=21.0) == 1
    assert store.reading(cluster_links.read_answers)("east", [first, second]) == {second: None}


def test_an_archive_is_readable_while_an_order_names_it(store: Store, lease: Lease) -> None:
    report(store)
    number = order(store, lease, "UploadCode", archive="f" * 64)
    assert store.reading(cluster_links.may_read_archive)("east", "f" * 64)
    assert not store.reading(cluster_links.may_read_archive)("west", "f" * 64) and not store.reading(
        cluster_links.may_read_archive
    )("east", "0" * 64)
    report(store, number=2, answers=[(number, '"gcs://x.zip"')])
    assert not store.reading(cluster_links.may_read_archive)("east", "f" * 64)


def test_orders_and_reports_notify_those_who_wait_for_them_and_nobody_else(store: Store, lease: Lease) -> None:
    notified: list[str] = []
    with (
        store.subscribe(notified.append, Topic.ORDERS.narrow_to("east")),
        store.subscribe(notified.append, Topic.REPORTS.narrow_to("east")),
        store.subscribe(lambda _: notified.append("a job")),
    ):
        report(store)
        order(store, lease)
    assert notified == [Topic.REPORTS.narrow_to("east"), Topic.ORDERS.narrow_to("east")]


def test_another_ray_cluster_never_follows_quietly_under_the_name_of_a_silent_one(store: Store) -> None:
    report(store, ray_cluster="a1")
    for number in (2, 3):
        report(store, number=number, ray_cluster="")
    with pytest.raises(ClusterNameTaken, match=r"--name.*--replace"):
        report(store, B, token_id="token-2", ray_cluster="b2", now=1_000.0)
    with pytest.raises(GatewayRefused, match="until its Ray cluster answers"):
        report(store, B, token_id="token-2", ray_cluster="", now=1_000.0)
    report(store, B, token_id="token-2", ray_cluster="b2", replaces=True, now=1_000.0)
    with pytest.raises(ClusterNameTaken):
        report(store, A, 4, ray_cluster="a1", now=1_001.0)


def test_a_ray_cluster_that_was_made_anew_follows_once_no_supervisor_of_the_one_before_reports(
    store: Store, lease: Lease, submit: Callable[..., str]
) -> None:
    report(store, ray_cluster="a1")
    job_id, token = submit(), new_attempt_token()
    store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, cluster="east", now=5.0)
    store.writing(supervisor_links.keep_token, lease.epoch)(job_id, 1, token)
    reports = SupervisorReports(attempt=1, seq=0, status=JobStatus(state=JobState.RUNNING, attempt=1))
    home = HomeReport(life=1, after=0, reports=reports)
    store.writing(supervisor_links.take_reports)(
        [ReceivedReport(AttemptCaller(job_id, 1, hash_secret(token)), home, 100.0)]
    )
    with pytest.raises(GatewayRefused, match="Jobs train in the Ray cluster"):
        report(store, B, ray_cluster="b2", now=101.0)
    report(store, B, ray_cluster="b2", now=100.0 + JOBS_SILENT_S)
    row = store.reading(cluster_links.find)("east")
    assert row is not None and row.life == B


def test_nothing_is_ordered_from_a_cluster_that_has_not_joined(store: Store, lease: Lease) -> None:
    with pytest.raises(ClusterNotFound, match="shoal join"):
        order(store, lease)


def test_the_token_of_a_gateway_is_of_one_cluster(store: Store) -> None:
    made = store.writing(cluster_links.create_token)("east", ClusterTokenRequest(expires_in_s=60.0), by="ada", now=1.0)
    known = store.reading(access.find_principal_by_token)(made.token, now=2.0)
    assert known is not None and (known.role, known.cluster, known.projects) == (Role.GATEWAY, "east", None)
    assert store.reading(access.find_principal_by_token)(made.token, now=62.0) is None
    assert [(one.id, one.cluster) for one in store.reading(access.list_tokens)()] == [(made.id, "east")]


def test_whoever_has_seen_a_number_has_seen_every_lower_one(store: Store, lease: Lease) -> None:
    """Orders are written by many threads at once while a gateway reads."""
    report(store)
    seen: list[int] = []
    wanted = 40

    def write() -> None:
        for _ in range(wanted // 4):
            order(store, lease)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    while len(seen) < wanted:
        seen += numbers(store, after=seen[-1] if seen else 0)
    for writer in writers:
        writer.join()
    assert seen == sorted(seen) and len({*seen}) == wanted
