"""What operators see and change of clusters, on both databases."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.access_views import ClusterTokenRequest
from shoal_service.core.access import BOOTSTRAP
from shoal_service.core.gateways import Incoming
from shoal_service.core.nodes import Cordon
from shoal_service.store import Lease, Store, access, cluster_links, driving
from shoal_service.store.access import CURRENT_ENTRY, AuditEntry, AuditQuery
from shoal_service.store.cluster_links import StoredReport
from shoal_service.store.errors import ClusterConflict, ClusterNotFound, GatewayRefused
from shoal_workers.contract.job import JobState


def join(store: Store, cluster: str = "west", *, by: str = "anna", now: float = 10.0) -> str:
    """Makes a token for a cluster; its id."""
    return store.writing(cluster_links.create_token)(cluster, ClusterTokenRequest(), by=by, now=now).id


def report(
    store: Store, token_id: str, cluster: str = "west", *, life: str = "a" * 16, now: float, **more: Any
) -> None:
    sender = Incoming(life, token_id, more.pop("number", 1), takes_over=True)
    known = {"address": "head:6379", "error": "", "snapshot": None, **more}
    store.writing(cluster_links.take_report)(cluster, StoredReport(sender=sender, **known), now=now)


@pytest.fixture
def run_in(store: Store, lease: Lease, submit: Callable[..., str]) -> Callable[..., str]:
    """Makes a job with an attempt in a cluster; its id."""

    def run(cluster: str) -> str:
        job_id = submit()
        store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, cluster=cluster, now=20.0)
        return job_id

    return run


def test_clusters_are_listed_from_their_first_token_on(store: Store, run_in: Callable[..., str]) -> None:
    west, _ = join(store), join(store, "east", now=11.0)
    report(store, west, now=12.0, error="Ray is away")
    run_in("west")
    east_entry, west_entry = store.reading(cluster_links.list_clusters)()
    assert (east_entry.name, east_entry.reported_at, east_entry.created_at) == ("east", None, 11.0)
    assert (west_entry.name, west_entry.reported_at, west_entry.error) == ("west", 12.0, "Ray is away")
    assert store.reading(cluster_links.count_jobs)() == {"west": 1}


def test_a_cordon_is_replaced_and_undone(store: Store) -> None:
    join(store)
    store.writing(cluster_links.cordon)("west", reason="new switches", now=5.0)
    store.writing(cluster_links.cordon)("west", reason="old switches", now=6.0)
    assert store.reading(cluster_links.list_clusters)()[0].cordon == Cordon(reason="old switches", requested_at=6.0)
    for _ in range(2):
        store.writing(cluster_links.uncordon)("west")
    assert store.reading(cluster_links.list_clusters)()[0].cordon is None


def test_labels_are_merged_and_checked_as_those_of_nodes(store: Store) -> None:
    join(store)
    store.writing(cluster_links.label)("west", {"region": "eu", "tier": "1"})
    store.writing(cluster_links.label)("west", {"tier": None, "absent": None, "zone": "b"})
    assert store.reading(cluster_links.list_clusters)()[0].labels == {"region": "eu", "zone": "b"}
    with pytest.raises(ValueError, match="not valid in a label of a node"):
        store.writing(cluster_links.label)("west", {"region": "a b"})
    with pytest.raises(ValueError, match="labels are too many"):
        store.writing(cluster_links.label)("west", {f"n{i}": "1" for i in range(100)})
    assert store.reading(cluster_links.list_clusters)()[0].labels == {"region": "eu", "zone": "b"}


def test_the_first_report_of_a_gateway_sets_labels_and_later_ones_do_not(store: Store) -> None:
    token = join(store)
    store.writing(cluster_links.label)("west", {"tier": "1", "region": "us"})
    report(store, token, now=20.0, labels={"region": "eu"})
    assert store.reading(cluster_links.list_clusters)()[0].labels == {"region": "eu", "tier": "1"}
    store.writing(cluster_links.label)("west", {"region": "asia"})
    report(store, token, now=21.0, number=2, labels={"region": "eu"})
    assert store.reading(cluster_links.list_clusters)()[0].labels["region"] == "asia", (
        "what an operator has set since stays"
    )
    report(store, token, now=22.0, life="b" * 16, labels={"region": "eu"})
    assert store.reading(cluster_links.list_clusters)()[0].labels["region"] == "eu", (
        "the gateway was started again with this label"
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.writing(cluster_links.cordon)("north", reason="r", now=1.0),
        lambda store: store.writing(cluster_links.uncordon)("north"),
        lambda store: store.writing(cluster_links.label)("north", {"a": "b"}),
        lambda store: store.writing(cluster_links.remove)("north", now=1.0),
        lambda store: store.reading(cluster_links.list_tokens)("north"),
    ],
)
def test_what_is_asked_of_an_unknown_cluster_is_refused(store: Store, call: Callable[[Store], Any]) -> None:
    join(store)
    with pytest.raises(ClusterNotFound, match=r"No cluster has joined as 'north'.*shoal clusters"):
        call(store)
    assert [one.name for one in store.reading(cluster_links.list_clusters)()] == ["west"]


def test_a_removed_cluster_is_gone_with_its_orders_and_its_tokens(store: Store, lease: Lease) -> None:
    first, second, other = join(store), join(store), join(store, "east")
    report(store, first, now=30.0)
    store.writing(cluster_links.write_order, lease.epoch)("west", "Reap", "{}", now=30.0)
    store.writing(cluster_links.remove)("west", now=31.0)
    assert [one.name for one in store.reading(cluster_links.list_clusters)()] == ["east"]
    assert store.reading(cluster_links.read_answers)("west", [1]) == {}
    revoked = {one.id: one.revoked_at for one in store.reading(access.list_tokens)()}
    assert (revoked[first], revoked[second], revoked[other]) == (31.0, 31.0, None)
    with pytest.raises(GatewayRefused, match="was removed"):
        report(store, first, now=31.5, number=2)  # of a control plane that has not seen the revocation yet
    assert [one.name for one in store.reading(cluster_links.list_clusters)()] == ["east"]
    report(store, join(store, now=32.0), now=33.0)
    assert [one.name for one in store.reading(cluster_links.list_clusters)()] == ["east", "west"], (
        "it may join again, with a new token"
    )


def test_a_cluster_with_jobs_is_kept_until_it_is_gone_and_removed_by_force(
    store: Store, run_in: Callable[..., str]
) -> None:
    token, job_id = join(store), run_in("west")
    report(store, token, now=30.0)
    with pytest.raises(ClusterConflict, match=r"1 job has an attempt there.*shoal move.*--force"):
        store.writing(cluster_links.remove)("west", now=31.0)
    with pytest.raises(ClusterConflict, match=r"its gateway reports. End its `shoal join` first"):
        store.writing(cluster_links.remove)("west", force=True, now=31.0)
    assert store.reading(access.get_token)(token).revoked_at is None
    store.writing(cluster_links.remove)("west", force=True, now=90.0)
    assert (
        store.reading(cluster_links.list_clusters)() == [] and store.get_job(job_id).status.state is JobState.STARTING
    )


def test_the_cluster_of_the_service_itself_is_kept_while_its_gateway_runs(store: Store) -> None:
    token = join(store, "default", by=BOOTSTRAP)
    report(store, token, "default", now=30.0)
    with pytest.raises(ClusterConflict, match="this service's own"):
        store.writing(cluster_links.remove)("default", force=True, now=31.0)
    report(store, token, "default", now=32.0, number=2, is_last=True)
    store.writing(cluster_links.remove)("default", now=33.0)
    assert store.reading(cluster_links.list_clusters)() == []


def test_tokens_are_listed_by_cluster(store: Store) -> None:
    first, second, _ = join(store, now=1.0), join(store, now=2.0), join(store, "east")
    store.writing(access.revoke_token)(first, now=3.0)
    assert [(one.id, one.revoked_at) for one in store.reading(cluster_links.list_tokens)("west")] == [
        (second, None),
        (first, 3.0),
    ]


def test_changes_of_clusters_are_in_the_audit(store: Store) -> None:
    join(store)
    for call in (
        lambda: store.writing(cluster_links.cordon)("west", reason="r", now=2.0),
        lambda: store.writing(cluster_links.label)("west", {"a": "b"}),
        lambda: store.writing(cluster_links.remove)("west", now=3.0),
    ):
        token = CURRENT_ENTRY.set(AuditEntry(at=2.0, address="10.0.0.1", operation="POST /x", path="/x", actor="anna"))
        try:
            call()
        finally:
            CURRENT_ENTRY.reset(token)
    assert [one.actor for one in store.reading(access.read)(AuditQuery())] == ["anna"] * 3
