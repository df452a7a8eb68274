"""Rows, nodes and measurements as the state that a policy decides on; foreign reservations, and freed places."""

from dataclasses import replace
from typing import Any

import pytest

from shoal_service.clusters.wire import ClusterSnapshot, Reservation
from shoal_service.control.cluster_reader import ForeignUse
from shoal_service.control.market.build import MarketBuilder, fingerprint, is_preempted
from shoal_service.control.market.outlook import predict_freed_nodes
from shoal_service.core.desired import Desired
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.nodes import Drain, DrainSource, Node
from shoal_service.core.scheduling.market import (
    START_S,
    SWITCH_S,
    MarketJob,
    MarketState,
    Preempt,
    Resize,
    Start,
    WorkerNeed,
)
from shoal_service.store.driving import DriveRow
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

SPEC = parse_spec(
    {
        "data": {"corpus": "python-stdlib"},
        "stop": {"steps": 100},
        "batch": {"global_size": 8, "micro_size": 1},
        "elasticity": {"min_workers": 1, "max_workers": 4},
    }
)


def row(state: JobState = JobState.QUEUED, *, granted: int = 0, attempt: int = 0, **status: Any) -> DriveRow:
    return DriveRow(
        id="job-a",
        spec=SPEC,
        spec_version=1,
        state=state,
        desired=Desired.RUN,
        attempt=attempt,
        granted_workers=granted,
        pulled_seq=0,
        created_at=5.0,
        priority=3,
        status=JobStatus(state=state, **status),
    )


def running(step: int, *, workers: int = 2, generation: int = 1, step_s: float = 0.5, **seconds: float) -> DriveRow:
    booked = Goodput(seconds={Category(name): 4 * value for name, value in seconds.items()}, at=1.0)
    return row(
        JobState.RUNNING,
        granted=workers,
        attempt=1,
        workers=workers,
        generation=generation,
        step=step,
        total_steps=100,
        eta_s=(100 - step) * step_s,
        goodput=booked,
    )


def node(name: str = "n1", **changes: Any) -> Node:
    return Node(node_id=name, ip="10.0.0.1", alive=True, cpus=4.0, gpus=0.0, memory_gib=8.0, **changes)


def build(builder: MarketBuilder, *rows: DriveRow, now: float = 10.0, **more: Any) -> MarketState:
    known: dict[str, Any] = {"nodes": [node()], "foreign": {}, "workers": {}, "projects": {}, "users": {}, **more}
    return builder.build(rows, now=now, **known)


def job(builder: MarketBuilder, driven: DriveRow, **more: Any) -> MarketJob:
    [market_job] = build(builder, driven, **more).jobs
    return market_job


def test_a_queued_job_has_its_limits_what_is_left_and_assumed_costs() -> None:
    market_job = job(MarketBuilder(), row())
    assert (market_job.submitted_at, market_job.min_workers, market_job.max_workers, market_job.priority) == (
        5.0,
        1,
        4,
        3,
    )
    assert (market_job.granted, market_job.held, market_job.left, market_job.done) == (0, 0, 800.0, 0.0)
    assert (market_job.switch_s, market_job.start_s, market_job.moved_at) == (SWITCH_S, START_S, None)
    assert market_job.curve.rate(2) > market_job.curve.rate(1)


def test_steps_that_are_done_count_in_samples() -> None:
    market_job = job(MarketBuilder(), running(25), workers={"job-a": {"n1": 2}})
    assert (market_job.granted, market_job.held, market_job.left, market_job.done) == (2, 2, 600.0, 200.0)


def test_the_speed_of_a_group_is_measured_once_its_first_steps_are_over() -> None:
    builder = MarketBuilder()
    predicted = job(builder, running(1)).curve.rate(2)
    early = job(builder, running(3))
    assert early.curve.rate(2) == predicted and not early.is_measured
    measured = job(builder, running(4, step_s=0.25))
    assert measured.is_measured
    assert measured.curve.rate(2) == pytest.approx(32.0)
    assert measured.curve.rate(2) / measured.curve.rate(1) < 2, "the other sizes are scaled along"


def test_switches_and_starts_are_measured_and_serve_other_jobs_as_estimate() -> None:
    builder = MarketBuilder()
    job(builder, running(2, starting=6.0))
    after = job(builder, running(9, generation=2, workers=3, starting=6.0, resizing=0.5))
    assert (after.start_s, after.switch_s) == (pytest.approx(6.0), pytest.approx(0.5))
    other = job(builder, replace(row(), id="job-b"))
    assert (other.start_s, other.switch_s) == (pytest.approx((START_S + 6.0) / 2), pytest.approx((SWITCH_S + 0.5) / 2))


def test_the_time_of_the_last_move_is_when_the_grant_was_seen_to_change() -> None:
    builder = MarketBuilder()
    assert job(builder, running(2), now=10.0).moved_at is None
    assert job(builder, running(3), now=11.0).moved_at is None
    assert job(builder, running(4, workers=3), now=12.0).moved_at == 12.0
    assert job(builder, running(5, workers=3), now=13.0).moved_at == 12.0


def test_an_attempt_that_is_preempted_claims_nothing_any_more() -> None:
    preempted = row(JobState.RUNNING, granted=0, attempt=1)
    assert is_preempted(preempted) and not is_preempted(row())
    assert build(MarketBuilder(), preempted, workers={"job-a": {"n1": 2}}).jobs == []


def test_a_node_offers_what_others_have_not_reserved() -> None:
    [offered] = build(MarketBuilder(), row(), foreign={"n1": WorkerNeed(cpus=3.0, memory_gib=2.0)}).nodes
    assert (offered.cpus, offered.memory_gib) == (1.0, 6.0)


def test_labels_of_ray_say_which_nodes_are_spot() -> None:
    labels = {"ray.io/market-type": "spot", "disk": "ssd"}
    [spot, other] = build(MarketBuilder(), row(), nodes=[node(labels=labels), node("n2")]).nodes
    assert spot.is_spot and spot.labels == labels and not other.is_spot


def test_where_a_job_may_run_comes_from_its_spec() -> None:
    worker = SPEC.worker.model_copy(update={"gpus": 1, "gpu_type": "H100", "selector": {"disk": "ssd"}})
    more = {"worker": worker, "project": "vision", "finish_by": 99.0, "capacity": "spot", "placement": "spread"}
    market_job = job(MarketBuilder(), replace(row(), spec=SPEC.model_copy(update=more)))
    assert (market_job.project, market_job.finish_by, market_job.capacity, market_job.placement) == (
        "vision",
        99.0,
        "spot",
        "spread",
    )
    assert market_job.selector == {"disk": "ssd", "ray.io/accelerator-type": "H100"}


def test_a_drained_node_offers_nothing() -> None:
    drain = Drain(reason="maintenance", requested_at=0.0, source=DrainSource.API)
    state = build(MarketBuilder(), row(), nodes=[node(drain=drain), node("n2")])
    assert [node.node_id for node in state.nodes] == ["n2"]


def test_progress_alone_does_not_change_what_a_decision_was_taken_for() -> None:
    builder = MarketBuilder()
    before = fingerprint(build(builder, running(5)))
    assert fingerprint(build(builder, running(6))) == before
    assert fingerprint(build(builder, running(6, workers=3))) != before
    assert fingerprint(build(builder, running(6), foreign={"n1": WorkerNeed(cpus=1.0)})) != before


def test_a_job_whose_row_is_unchanged_keeps_its_value() -> None:
    builder, same = MarketBuilder(), row()
    assert job(builder, same) is job(builder, same)


def script_row(step: int, **status: Any) -> DriveRow:
    spec = parse_spec({"script": {"file": "train.py"}, "elasticity": {"min_workers": 1, "max_workers": 4}})
    running_one = row(JobState.RUNNING, granted=2, attempt=1, workers=2, generation=1, step=step, **status)
    return replace(running_one, spec=spec)


def test_what_is_left_of_a_script_is_not_known() -> None:
    market_job = job(MarketBuilder(), script_row(25, tokens=None))
    assert (market_job.left, market_job.done) == (None, 0.0)


def test_the_speed_of_a_script_is_learnt_from_its_samples_per_second_only() -> None:
    builder = MarketBuilder()
    predicted = job(builder, script_row(0)).curve
    assert job(builder, script_row(9, step_s=0.5)).curve == predicted, "steps alone say nothing"
    measured = job(builder, script_row(10, tokens=800, tokens_per_s=160.0)).curve
    assert measured.rate(2) == 160.0 and measured.rate(4) == pytest.approx(160.0 * 1.9)


def test_what_is_left_of_a_script_is_known_once_it_says_its_last_step_and_its_speed_is_measured() -> None:
    builder = MarketBuilder()
    known = {"tokens": 800, "tokens_per_s": 160.0, "total_steps": 100}
    assert job(builder, script_row(9, **known)).left is None, "its speed is not measured yet"
    market_job = job(builder, script_row(20, **known))
    assert (market_job.left, market_job.done) == (80 * 40.0, 800.0)


ONE = WorkerNeed(cpus=1.0)
NODE = Node(node_id="n1", ip="10.0.0.1", alive=True, cpus=4.0, gpus=0.0, memory_gib=8.0)


def seen(free: float, *workers: Reservation, memory_gib: float = 8.0) -> ClusterSnapshot:
    return ClusterSnapshot((NODE,), {"n1": WorkerNeed(cpus=free, memory_gib=memory_gib)}, workers)


def worker(index: int, *, job: str = "job-a", is_alive: bool = True) -> Reservation:
    return Reservation(f"shoal/{job}/1/worker-{index}", job, "n1", ONE, is_alive)


def test_what_nobody_of_us_has_reserved_is_foreign_from_the_first_look_on() -> None:
    foreign = ForeignUse().observe(seen(1.5, worker(0), memory_gib=6.0), {"job-a"}, 0.0)
    assert foreign == {"n1": WorkerNeed(cpus=1.5, memory_gib=2.0)}


def test_workers_of_another_service_on_the_same_cluster_are_foreign() -> None:
    foreign = ForeignUse().observe(seen(2.0, worker(0), worker(1, job="job-of-others")), {"job-a"}, 0.0)
    assert foreign == {"n1": ONE}


def test_a_worker_that_has_just_ended_is_not_taken_for_a_tenant() -> None:
    use = ForeignUse()
    assert use.observe(seen(2.0, worker(0), worker(1)), {"job-a"}, 0.0) == {}
    assert use.observe(seen(2.0, worker(0)), {"job-a"}, 1.0) == {}, "Ray reports its resources as free a little later"
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 2.0) == {}


def test_a_tenant_that_comes_while_no_worker_of_ours_comes_or_goes_counts_at_once() -> None:
    use = ForeignUse()
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 0.0) == {}
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 1.0) == {"n1": WorkerNeed(cpus=2.0)}
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 2.0) == {}


def test_a_tenant_that_comes_as_a_worker_ends_counts_once_it_has_stayed() -> None:
    use = ForeignUse()
    use.observe(seen(2.0, worker(0), worker(1)), {"job-a"}, 0.0)
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 1.0) == {}
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 4.5) == {}
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 5.0) == {"n1": WorkerNeed(cpus=2.0)}


def test_a_worker_that_starts_hides_no_tenant() -> None:
    """Ray lists it before its resources are taken."""
    use, starting = ForeignUse(), worker(1, is_alive=False)
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 0.0) == {"n1": WorkerNeed(cpus=2.0)}
    assert use.observe(seen(1.0, worker(0), starting), {"job-a"}, 1.0) == {"n1": WorkerNeed(cpus=2.0)}
    assert use.observe(seen(0.0, worker(0), worker(1)), {"job-a"}, 2.0) == {"n1": WorkerNeed(cpus=2.0)}


def test_a_worker_that_is_created_for_long_waits_for_what_another_has() -> None:
    use, waiting = ForeignUse(), worker(1, is_alive=False)
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 0.0) == {}
    for second in range(1, 120):
        assert use.observe(seen(0.0, worker(0), waiting), {"job-a"}, float(second)) == {}, "it may be starting"
    for second in range(120, 127):
        foreign = use.observe(seen(0.0, worker(0), waiting), {"job-a"}, float(second))
    assert foreign == {"n1": WorkerNeed(cpus=3.0)}


def test_nothing_is_known_of_a_node_that_has_not_reported_or_is_dead() -> None:
    dead = NODE.model_copy(update={"alive": False})
    assert ForeignUse().observe(ClusterSnapshot((NODE,)), set(), 0.0) == {}
    assert ForeignUse().observe(ClusterSnapshot((dead,), {"n1": ONE}), set(), 0.0) == {}


def test_a_sum_of_fractions_costs_no_worker() -> None:
    thirds = [
        Reservation(f"shoal/job-a/1/worker-{i}", "job-a", "n1", WorkerNeed(cpus=0.1), is_alive=True) for i in range(3)
    ]
    assert ForeignUse().observe(seen(3.7, *thirds), {"job-a"}, 0.0) == {}


HELD = [Reservation(f"shoal/a/1/worker-{index}", "a", f"n{index // 4}", ONE) for index in range(12)]
GRANTS = {"a": 12, "urgent": 0, "later": 0}


def in_one_cluster(_: Start | Resize | Preempt) -> str:
    return "default"


def test_a_job_that_shrinks_gives_up_its_newest_workers() -> None:
    changes = [Resize("a", 9, "r"), Start("urgent", 3, "r")]
    assert predict_freed_nodes(changes, GRANTS, HELD, in_one_cluster) == {"urgent": {"n2": 3}}
    assert predict_freed_nodes([Resize("a", 6, "r"), Start("urgent", 6, "r")], GRANTS, HELD, in_one_cluster) == {
        "urgent": {"n1": 2, "n2": 4}
    }


def test_a_preempted_job_gives_up_all_and_two_jobs_share_the_places() -> None:
    changes = [Preempt("a", "r", "urgent"), Start("urgent", 8, "r"), Start("later", 8, "r")]
    assert predict_freed_nodes(changes, GRANTS, HELD, in_one_cluster) == {
        "urgent": {"n0": 4, "n1": 4},
        "later": {"n2": 4},
    }


def test_nothing_is_expected_where_places_are_free_or_workers_are_not_alive() -> None:
    assert predict_freed_nodes([Start("urgent", 3, "r")], GRANTS, HELD, in_one_cluster) == {}
    assert predict_freed_nodes([Resize("a", 13, "r"), Start("urgent", 3, "r")], GRANTS, HELD, in_one_cluster) == {}
    starting = [Reservation(held.worker_id, held.job_id, held.node_id, ONE, is_alive=False) for held in HELD]
    assert (
        predict_freed_nodes([Preempt("a", "r", "urgent"), Start("urgent", 3, "r")], GRANTS, starting, in_one_cluster)
        == {}
    )


def test_workers_of_another_cluster_are_no_places() -> None:
    def find_cluster(change: Start | Resize | Preempt) -> str:
        return "west" if isinstance(change, Start) else "default"

    assert predict_freed_nodes([Resize("a", 9, "r"), Start("urgent", 3, "r")], GRANTS, HELD, find_cluster) == {}
