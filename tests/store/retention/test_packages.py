"""Packages of `code.pip` in retention: asked for once a day and by users, removed from their nodes, and kept for ever
if the setting says so."""

import asyncio

from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from shoal_service.clock import SystemClock
from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.clusters.wire import UnusedPackages
from shoal_service.control.job_storage import JobStorage
from shoal_service.control.retention import RetentionCollector, RetentionConfig
from shoal_service.core.retention import Kind, RetentionRules
from shoal_service.fleet_views import GcView
from shoal_service.store import Store
from shoal_service.telemetry.tallies import Count

DAY = 86_400.0
OLD, NEW = "a" * 32, "b" * 32


def collector(store: Store, cluster: FakeCluster, days: float = 30) -> tuple[RetentionCollector, Count]:
    config, tallies = RetentionConfig(rules=RetentionRules(packages_days=days)), Count(Kind)
    return RetentionCollector(
        store, JobStorage(""), SystemClock(), config, tallies, FakeClusters.single(cluster)
    ), tallies


def cluster_with_packages() -> FakeCluster:
    cluster = FakeCluster()
    cluster.packages = [
        UnusedPackages("n1", "10.0.0.1", OLD, 3 << 20, 40 * DAY),
        UnusedPackages("n2", "10.0.0.2", NEW, 1 << 20, 2 * DAY),
    ]
    return cluster


def collect(one: RetentionCollector, *, dry_run: bool = False) -> GcView:
    return asyncio.run(one.collect(dry_run=dry_run, within_s=10, limit=10))


def test_old_packages_are_removed_from_their_node_and_a_dry_run_says_which(store: Store) -> None:
    cluster = cluster_with_packages()
    one, tallies = collector(store, cluster)
    [planned] = collect(one, dry_run=True).removals
    assert (planned.kind.value, planned.name) == ("packages", f"n1/{OLD}")
    assert planned.reason == "3.0 MiB on 10.0.0.1, last used 40 days ago, and retain_packages_days is 30"
    assert len(cluster.packages) == 2, "a dry run deletes nothing"
    assert [(done.name, done.error) for done in collect(one).removals] == [(f"n1/{OLD}", "")]
    assert [kept.name for kept in cluster.packages] == [NEW]
    assert tallies.value("packages") == 1
    assert collect(one).removals == ()


def test_packages_that_are_used_again_meanwhile_are_not_counted(store: Store) -> None:
    cluster = cluster_with_packages()
    one, tallies = collector(store, cluster)

    class UsedAgain(FakeCluster):
        async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
            found = await cluster.unused_packages(for_s)
            cluster.packages = []
            return found

        remove_packages = cluster.remove_packages

    one, tallies = collector(store, UsedAgain())
    assert len(collect(one).removals) == 1 and tallies.value("packages") == 0


def test_a_cluster_that_is_away_is_asked_again_and_hinders_no_other_removal(store: Store) -> None:
    cluster = cluster_with_packages()
    cluster.error = ClusterUnreachable("no head")
    one, _ = collector(store, cluster)
    assert collect(one) == GcView(dry_run=False)
    cluster.error = None
    assert len(collect(one).removals) == 1


def test_for_ever_is_a_choice_and_a_process_without_a_cluster_removes_none(store: Store) -> None:
    one, _ = collector(store, cluster_with_packages(), days=0)
    assert collect(one).removals == ()
    alone = RetentionCollector(store, JobStorage(""), SystemClock(), RetentionConfig(), Count(Kind))
    assert collect(alone).removals == ()
