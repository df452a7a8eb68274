"""When a job is given up in a cluster that does not answer."""

from dataclasses import replace
from itertools import product

import pytest

from shoal_service.core.lost_clusters import OtherCluster, SilentJob, Verdict, decide

JOB = SilentJob(cluster="west", named_cluster="", cluster_s=40.0, supervisor_s=40.0, wait_s=30.0, saved_step=7)
GOOD, UNKNOWN, BAD = OtherCluster("east", ""), OtherCluster("north", None), OtherCluster("south", "no such directory")
SILENCES = (0.0, 29.9, 30.0, 30.1, 1e9)
OTHERS = [
    tuple(cluster for cluster, there in zip((GOOD, UNKNOWN, BAD), is_there, strict=True) if there)
    for is_there in product((0, 1), repeat=3)
]


def test_every_combination_follows_the_rules() -> None:
    for cluster_s, supervisor_s, named, others in product(
        SILENCES, SILENCES, ("", "west", "east", "south", "gone"), OTHERS
    ):
        job = replace(JOB, cluster_s=cluster_s, supervisor_s=supervisor_s, named_cluster=named)
        decision = decide(job, others)
        assert decision == decide(job, tuple(reversed(others))), "the order does not matter"
        assert decision.reason and bool(decision.obstacle) == (decision.verdict is Verdict.STAY)
        allowed = [cluster for cluster in others if named in ("", cluster.name)]
        if min(cluster_s, supervisor_s) <= 30.0:
            assert decision.verdict is Verdict.WAIT, "both are silent for longer than elasticity.wait_s, or nothing"
        elif any(cluster.why_not == "" for cluster in allowed):
            assert decision.verdict is Verdict.REQUEUE
        elif any(cluster.why_not is None for cluster in allowed):
            assert decision.verdict is Verdict.WAIT
        else:
            assert decision.verdict is Verdict.STAY


def test_longer_silence_never_takes_a_requeue_back() -> None:
    for others in OTHERS:
        verdicts = [decide(replace(JOB, cluster_s=s, supervisor_s=s), others).verdict for s in SILENCES]
        requeued = [verdict is Verdict.REQUEUE for verdict in verdicts]
        assert requeued == sorted(requeued)


@pytest.mark.parametrize(
    ("job", "others", "text"),
    [
        (JOB, (GOOD,), "it goes on in another cluster from the checkpoint of step 7"),
        (replace(JOB, saved_step=None), (GOOD,), "it goes on in another cluster from the start"),
        (JOB, (GOOD,), "have been silent for 40 s, longer than elasticity.wait_s (30 s)"),
        (replace(JOB, named_cluster="west"), (GOOD,), "`shoal move JOB --to any` lets it go on in another cluster"),
        (
            replace(JOB, named_cluster="gone"),
            (GOOD,),
            "cluster 'gone', which worker.cluster names, does not answer",
        ),
        (JOB, (), "no other cluster answers. `shoal clusters` lists them"),
        (JOB, (BAD,), "in 'south': no such directory"),
        (replace(JOB, supervisor_s=3.0), (GOOD,), "the job waits for 30 s (elasticity.wait_s)"),
        (replace(JOB, is_leaving=True), (), "longer than elasticity.wait_s (30 s)"),
    ],
)
def test_the_reason_has_the_numbers_and_the_way_out(
    job: SilentJob, others: tuple[OtherCluster, ...], text: str
) -> None:
    assert text in decide(job, others).reason


def test_the_obstacle_does_not_change_with_the_seconds() -> None:
    longer = replace(JOB, cluster_s=99.0, supervisor_s=99.0)
    assert decide(JOB, (BAD,)).obstacle == decide(longer, (BAD,)).obstacle
    assert decide(JOB, (BAD,)).reason != decide(longer, (BAD,)).reason


def test_a_job_that_a_user_pauses_or_cancels_needs_no_other_cluster() -> None:
    assert decide(replace(JOB, is_leaving=True), ()).verdict is Verdict.REQUEUE
