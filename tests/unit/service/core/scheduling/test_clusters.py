"""Several clusters: no job spans them, and one that may start in any gets that where it does the least harm."""

from dataclasses import replace

import pytest

from kit.market import NOW, carried_out, grants, job, market, nodes, reasons
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import (
    ClusterState,
    Decision,
    MarketNode,
    Project,
    Resize,
    Start,
    Wait,
    WorkerNeed,
)


def cluster(name: str, *cpus: float, **fields: object) -> list[MarketNode]:
    return [replace(node, node_id=f"{name}-{node.node_id}", cluster=name) for node in nodes(*cpus, **fields)]


def starts(decisions: list[Decision]) -> dict[str, tuple[str, int]]:
    return {one.job_id: (one.cluster, one.workers) for one in decisions if isinstance(one, Start)}


def waits(decisions: list[Decision]) -> dict[str, Wait]:
    return {one.job_id: one for one in decisions if isinstance(one, Wait)}


def test_a_job_starts_where_its_minimum_is_free_before_it_shrinks_another_one() -> None:
    running = job("first", 1, 4, granted=4, cluster="east")
    state = market([running, job("second", 2, 2)], [*cluster("east", 4), *cluster("west", 2)])
    assert decide(state, NOW) == [
        Start("second", 2, "Starting with 2 workers (1 CPU each) in the cluster west.", "west")
    ]


def test_a_job_shrinks_the_fewest_workers_of_others_and_these_are_of_its_cluster() -> None:
    running = [job(name, 1, 4, granted=4, cluster=name) for name in ("east", "west")]
    state = market([*running, job("new", 3, 3)], [*cluster("east", 4), *cluster("west", 6)])
    assert decide(state, NOW) == [
        Resize("west", 3, "Gave 1 worker to new, which starts with 3: -22 % here.", (("new", 1),)),
        Start(
            "new",
            3,
            "Starting with 3 workers (1 CPU each) in the cluster west; west gives workers.",
            "west",
            (("west", 1),),
        ),
    ]


def test_a_job_starts_where_jobs_of_less_priority_and_fewer_workers_are_preempted() -> None:
    running = [
        job("east", 2, 2, granted=2, cluster="east", priority=5),
        job("north", 4, 4, granted=4, cluster="north"),
        job("west", 2, 2, granted=2, cluster="west"),
    ]
    clusters = [*cluster("east", 2), *cluster("north", 4), *cluster("west", 2)]
    decisions = decide(market([*running, job("urgent", 2, 2, priority=9)], clusters), NOW)
    assert [one.job_id for one in decisions] == ["west", "urgent"]
    assert starts(decisions) == {"urgent": ("west", 2)}


def test_jobs_that_can_grow_are_spread_and_those_that_cannot_leave_a_cluster_whole() -> None:
    clusters = [*cluster("east", 8), *cluster("west", 8)]
    elastic = starts(decide(market([job(f"job-{at}", 1, 8) for at in range(4)], clusters), NOW))
    assert sorted(name for name, _ in elastic.values()) == ["east", "east", "west", "west"]
    rigid = [job(f"job-{at}", 1, 1) for at in range(4)] + [job("large", 8, 8, left=1e9)]
    assert starts(decide(market(rigid, clusters), NOW)) == {f"job-{at}": ("east", 1) for at in range(4)} | {
        "large": ("west", 8)
    }


def test_a_job_for_which_only_two_clusters_together_have_room_says_that_jobs_do_not_span_them() -> None:
    running = [job(name, 2, 2, granted=2, cluster=name) for name in ("east", "west")]
    clusters = [*cluster("east", 5), *cluster("west", 4)]
    decisions = decide(market([*running, job("new", 4, 4), job("huge", 6, 6)], clusters), NOW)
    assert waits(decisions)["new"].reason == (
        "Needs 4 workers of 1 CPU each; 3 in the cluster east, 2 in the cluster west can be freed by shrinking other "
        "jobs to their minimum, and a job does not span clusters. Raise the priority above 0 to preempt jobs, or add "
        "nodes."
    )
    assert waits(decisions)["huge"].reason == (
        "Needs 6 workers of 1 CPU each; the nodes that it may use have room for 5 in the cluster east, 4 in the "
        "cluster west, and a job does not span clusters. Add nodes, or lower elasticity.min_workers."
    )


def test_clusters_without_room_are_named_together_and_of_many_those_with_most_room() -> None:
    running = [job(name, 2, 2, granted=2, cluster=name) for name in ("east", "west")]
    decisions = decide(market([*running, job("new", 2, 2)], [*cluster("east", 2), *cluster("west", 2)]), NOW)
    assert "; 0 in each of the clusters east and west can be freed by shrinking other jobs" in reasons(decisions)["new"]
    many = [node for at in range(5) for node in cluster(f"c{at}", at + 1)]
    assert (
        "have room for 5 in the cluster c4, 4 in the cluster c3, 3 in the cluster c2, less in 2 others, and a job does "
        "not span clusters."
    ) in reasons(decide(market([job("new", 9, 9)], many), NOW))["new"]


def test_a_job_is_expected_where_it_fits_first_and_held_by_the_jobs_there() -> None:
    running = [
        job("long", 4, 4, granted=4, cluster="east", left=34.0 * 1000),
        job("short", 4, 4, granted=4, cluster="west", left=34.0 * 100),
    ]
    queued = [job(f"new-{at}", 4, 4, submitted_at=NOW + at) for at in range(3)]
    found = waits(decide(market([*running, *queued], [*cluster("east", 4), *cluster("west", 4)]), NOW))
    assert [(one.expected_at, one.holders) for one in found.values()] == [
        (NOW + 100, ("short",)),
        (NOW + 1000, ("long",)),
        (None, ("long",)),
    ]


def test_what_an_earlier_job_leaves_of_a_cluster_is_free_at_once_for_the_next_one() -> None:
    running = [
        job("first", 4, 4, granted=4, cluster="east", left=100.0),
        job("later", 2, 2, granted=2, cluster="east", left=900.0),
        job("other", 2, 2, granted=2, cluster="west", left=500.0),
    ]
    queued = [job("three", 3, 3), job("one", 1, 1)]
    expected = waits(decide(market([*running, *queued], [*cluster("east", 6), *cluster("west", 2)]), NOW))
    assert expected["three"].expected_at == expected["one"].expected_at < NOW + 500.0
    assert expected["one"].holders == ("first",)


def test_the_start_is_reserved_where_it_is_earliest_and_the_other_cluster_is_not_held_back() -> None:
    running = [
        job("long", 3, 3, granted=3, cluster="east", left=1e9),
        job("short", 3, 3, granted=3, cluster="west", left=1000.0),
    ]
    head = job("head", 4, 4, submitted_at=NOW - 9000)
    small = [job(f"small-{at}", 1, 1, left=1e9) for at in range(2)]
    decisions = decide(market([*running, head, *small], [*cluster("east", 4), *cluster("west", 4)]), NOW)
    assert starts(decisions) == {"small-0": ("east", 1)}
    tied = replace(small[1], cluster="west")
    decisions = decide(market([*running, head, tied], [*cluster("east", 4), *cluster("west", 4)]), NOW)
    assert waits(decisions)["small-1"].reason == (
        "Needs 1 worker of 1 CPU each; to start now in the cluster west would delay head, which is before it and whose "
        "start is reserved."
    )


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        (
            {"east": ClusterState.OPEN},
            "worker.cluster is west, and no cluster of this name has joined. Join it (shoal join), or set "
            "worker.cluster: any.",
        ),
        (
            {"east": ClusterState.OPEN, "west": ClusterState.AWAY},
            "worker.cluster is west, and this cluster does not answer. The job starts when it answers again; to start "
            "elsewhere, set worker.cluster: any.",
        ),
        (
            {"east": ClusterState.OPEN, "west": ClusterState.CORDONED},
            "worker.cluster is west, and this cluster is cordoned. Uncordon it (shoal clusters uncordon west), or set "
            "worker.cluster: any.",
        ),
        (
            {"east": ClusterState.OPEN, "west": ClusterState.OPEN},
            "Needs 1 worker of 1 CPU each; the nodes that it may use in the cluster west have room for 0. Add nodes "
            "there, lower elasticity.min_workers, or set worker.cluster: any.",
        ),
    ],
    ids=["unknown", "away", "cordoned", "without nodes"],
)
def test_a_job_that_is_tied_to_a_cluster_that_takes_no_jobs_says_why_and_the_way_out(
    clusters: dict[str, ClusterState], words: str
) -> None:
    state = replace(market([job("tied", 1, 1, cluster="west")], cluster("east", 4)), clusters=clusters)
    assert reasons(decide(state, NOW))["tied"] == words


def test_a_job_does_not_start_where_its_checkpoints_are_not_known_to_be_reachable() -> None:
    new = job("new", 1, 4, excluded_clusters=frozenset({"west"}))
    running = job("a", 3, 3, granted=3, cluster="east")
    clusters = [*cluster("east", 4), *cluster("west", 9)]
    assert starts(decide(market([running, new], clusters), NOW)) == {"new": ("east", 1)}
    full = decide(market([replace(running, granted=4, min_workers=4, max_workers=4), new], clusters), NOW)
    assert reasons(full)["new"].endswith("Its checkpoints are not known to be reachable in the cluster west.")
    nowhere = replace(new, excluded_clusters=frozenset({"east", "west"}))
    assert reasons(decide(market([nowhere], clusters), NOW))["new"] == (
        "Its checkpoints (checkpoint.url) are not known to be reachable in the clusters east and west. It waits until "
        "they are."
    )


def test_jobs_of_a_cluster_that_is_away_keep_their_workers_and_count_for_the_limit() -> None:
    lost = job("lost", 2, 4, granted=3, held=3, cluster="west", is_leaving=True, project="p", on_nodes={"west-0": 3})
    state = replace(
        market([lost, job("new", 1, 4, project="p")], cluster("east", 8), Project(name="p", limit=5)),
        clusters={"east": ClusterState.OPEN, "west": ClusterState.AWAY},
    )
    decisions = decide(state, NOW)
    assert starts(decisions) == {"new": ("east", 2)}, "the limit of 5 holds over both"
    assert grants(carried_out(state, decisions)) == {"lost": 3, "new": 2}
    full = replace(state, jobs=[lost, job("new", 9, 9)])
    assert reasons(decide(full, NOW))["new"].endswith(
        "have room for 8 in the cluster east. Add nodes, or lower elasticity.min_workers. The cluster west does not "
        "answer."
    )


def test_what_is_guaranteed_counts_in_all_clusters() -> None:
    jobs = [
        job("borrower", 1, 8, granted=8, cluster="east", project="a"),
        job("owner", 1, 2, granted=2, cluster="west", project="b"),
        job("more", 1, 8, project="b"),
    ]
    state = market(jobs, [*cluster("east", 8), *cluster("west", 2)], Project(name="a"), Project(name="b", guaranteed=6))
    assert grants(carried_out(state, decide(state, NOW))) == {"borrower": 4, "owner": 2, "more": 4}


def test_a_job_of_workers_that_only_one_cluster_has_starts_there() -> None:
    gpus = [replace(node, gpus=2.0) for node in cluster("west", 4)]
    new = job("new", 1, 2, need=WorkerNeed(cpus=1.0, gpus=1.0))
    assert starts(decide(market([new], [*cluster("east", 64), *gpus]), NOW)) == {"new": ("west", 2)}
