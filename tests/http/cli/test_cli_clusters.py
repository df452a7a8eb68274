"""Nodes, clusters and moves on the command line, against a real server whose scheduler sees two clusters."""

import threading
import time
from typing import Any

import pytest

from kit.processes.server import until
from shoal_service.access_views import ClusterTokenRequest
from shoal_service.core.desired import Desired
from shoal_service.fleet_views import ClusterSummary, NodeView
from shoal_service.reports import SupervisorReports
from shoal_service.store import cluster_links, driving, reporting, submissions
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState


@pytest.fixture
def two(service: Any) -> Any:
    for name in ("default", "west"):
        service.store.writing(cluster_links.create_token)(name, ClusterTokenRequest(), by="test", now=time.time())
    summaries = (
        ClusterSummary(name="default", connected=True, silent_s=0.5, num_nodes=1, cpus_total=4, cpus_free=1),
        ClusterSummary(name="west", why_away="its gateway has not reported for 90 s", silent_s=90.0, gpus_total=8),
    )
    known = service.cluster.view
    nodes = tuple(
        NodeView.of(known.nodes[0]).model_copy(update={"node_id": letter * 56, "cluster": cluster})
        for letter, cluster in (("a", "default"), ("b", "west"))
    )
    service.cluster.view = known.model_copy(update={"clusters": summaries, "nodes": nodes})
    return service


def begin(service: Any, cluster: str, **changes: Any) -> Any:
    job = service.add_job(**changes)
    service.store.writing(driving.begin_attempt, service.epoch)(job.id, workers=2, cluster=cluster, now=time.time())
    service._seq[job.id] = 0
    return job


def test_clusters_are_listed_with_and_without_a_further_word(two: Any, shoal: Any) -> None:
    assert [one["name"] for one in shoal("clusters", "--json").json()] == ["default", "west"]
    text = shoal("clusters").out
    assert "connected" in text and "unreachable" in text and "1/4" in text and "0/8" in text
    assert "its gateway has not reported for 90 s" in text
    assert shoal("clusters", "list").out == text


def test_a_cluster_is_cordoned_labelled_and_used_again(two: Any, shoal: Any) -> None:
    assert shoal("clusters", "cordon", "west", "--reason", "new switches", "--json").json()["cordon"] is not None
    assert "cordoned: new switches" in shoal("clusters").out
    assert shoal("clusters", "uncordon", "west", "--json").json()["cordon"] is None
    assert "region=eu" in shoal("clusters", "label", "west", "region=eu", "tier=1").out
    assert shoal("clusters", "label", "west", "tier-", "--json").json()["labels"] == {"region": "eu"}
    wrong = shoal("clusters", "label", "west", "region=a b")
    assert wrong.code != 0 and "not valid in a label of a node" in wrong.err


def test_a_cluster_is_removed_with_its_tokens(two: Any, shoal: Any) -> None:
    job = begin(two, "west")
    refused = shoal("clusters", "remove", "west")
    assert refused.code != 0 and "shoal clusters remove west --force" in refused.err
    assert "west" in shoal("clusters", "tokens", "west").out
    assert shoal("clusters", "remove", "west", "--force").code == 0
    assert [one["name"] for one in shoal("clusters", "--json").json()] == ["default"]
    assert shoal("clusters", "cordon", "west").code == 4
    assert shoal("clusters", "tokens", "west", "--json").json()[0]["revoked_at"] is not None
    assert shoal("show", job.id, "--json").json()["status"]["cluster"] == "west"


def test_nodes_and_jobs_show_their_cluster_only_if_there_are_several(two: Any, shoal: Any) -> None:
    first = begin(two, "default")
    assert " cluster " not in shoal("jobs").out
    second = begin(two, "west", worker={"cluster": "west"})
    lines = {line.split()[0]: line for line in shoal("jobs").out.splitlines()}
    assert " default " in lines[first.id] and " west " in lines[second.id]
    assert " west " in shoal("nodes").out
    assert "west (from the spec)" in shoal("show", second.id).out
    assert "west" in shoal("cluster").out
    known = two.cluster.view
    nodes, clusters = known.nodes[:1], known.clusters[:1]
    two.cluster.view = known.model_copy(update={"nodes": nodes, "clusters": clusters})
    assert "default" not in shoal("nodes").out


def test_a_job_is_moved_and_followed_until_it_trains_there(two: Any, shoal: Any) -> None:
    job = begin(two, "default")
    moved = shoal("move", job.id, "--to", "west")
    assert moved.code == 0 and "it goes to west" in moved.out
    store, epoch = two.store, two.epoch

    def scheduler() -> None:
        """What the control loop does: the attempt ends, the next one begins there."""
        store.writing(driving.requeue, epoch)(
            job.id, reason=EndReason.PREEMPTED, message="moves to west", now=time.time()
        )
        attempt = store.writing(driving.begin_attempt, epoch)(job.id, workers=2, cluster="west", now=time.time())
        status = JobStatus(state=JobState.RUNNING, attempt=attempt)
        store.writing(reporting.apply, epoch)(
            job.id, SupervisorReports(attempt=attempt, seq=1, status=status), now=time.time()
        )

    later = threading.Thread(target=scheduler)
    later.start()
    waited = shoal("move", job.id, "--to", "west", "--wait")
    later.join()
    assert waited.code == 0 and "it trains in west" in waited.out and "RUNNING in west" in waited.err


def test_a_move_that_ends_elsewhere_or_is_refused_says_so(two: Any, shoal: Any) -> None:
    job = two.add_job()
    two.cluster.why_not["west"] = "the cluster is cordoned (new switches)"
    refused = shoal("move", job.id, "--to", "west")
    assert refused.code != 0 and "cannot be moved to cluster west: the cluster is cordoned" in refused.err
    assert shoal("move", job.id, "--to", "nowhere").code == 4
    assert shoal("move", job.id, "--to", "any", "--now").code == 2
    two.cluster.why_not.clear()

    def cancel() -> None:
        until(lambda: two.store.get_job(job.id).spec.worker.cluster == "west", "the move")
        two.store.writing(submissions.request)(job.id, Desired.CANCEL, now=time.time())

    later = threading.Thread(target=cancel)
    later.start()
    assert shoal("move", job.id, "--to", "west", "--wait").code == 1
    later.join()


def test_nodes_are_listed_in_both_forms(shoal: Any) -> None:
    [node] = shoal("nodes", "--json").json()
    assert node["node_id"] == "a" * 56 and node["drain"] is None
    assert "alive" in shoal("nodes").out


def test_a_node_is_drained_by_the_beginning_of_its_id_or_its_address_and_used_again(shoal: Any) -> None:
    drained = shoal("drain", "aaa", "--reason", "new disks", "--deadline-s", "90", "--json").json()
    assert drained["drain"]["reason"] == "new disks" and drained["drain"]["deadline"] is not None
    text = shoal("nodes").out
    assert "drained" in text and "new disks" in text
    assert shoal("drain", "127.0.0.1", "--undo", "--json").json()["drain"] is None


def test_an_unknown_node_ends_with_4(shoal: Any) -> None:
    ran = shoal("drain", "bbb")
    assert ran.code == 4 and "shoal nodes" in ran.err


def test_undo_cannot_be_combined_with_a_deadline(shoal: Any) -> None:
    for option in ("--deadline-s", "--reason"):
        refused = shoal("drain", "aaa", "--undo", option, "0")
        assert refused.code == 2 and f"--undo cannot be combined with {option}" in refused.err


def test_a_node_is_cordoned_and_used_again(shoal: Any) -> None:
    assert shoal("cordon", "aaa", "--reason", "bad fan", "--json").json()["cordon"]["reason"] == "bad fan"
    text = shoal("nodes").out
    assert "cordoned" in text and "bad fan" in text
    assert shoal("cordon", "aaa", "--undo", "--json").json()["cordon"] is None
