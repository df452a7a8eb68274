"""The twin of one job: its time, its failures, and that a sample of nodes stands for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from shoal_service.core.attempt.state import Timeouts, later_s
from shoal_service.simulator.failures import Cause, Failure, Takes, draw_failures
from shoal_service.simulator.recovery_costs import RecoveryCosts
from shoal_service.simulator.time_account import TERMS
from shoal_service.simulator.twin import TwinJob, TwinLayout, TwinResult, find_timeouts, run_twin
from shoal_workers.contract.spec import JobSpec

COSTS = RecoveryCosts()
STEP_S = 5.0
DAY_S = 86400.0


def make_job(
    gpus: int = 4096, *, standby: int = 64, used: Callable[[int], int] = lambda nodes: nodes, **spec: Any
) -> TwinJob:
    document = {
        "task": "m:T",
        "stop": {"steps": 10**9},
        "batch": {"global_size": gpus, "micro_size": 1},
        "elasticity": {"min_workers": gpus // 2, "max_workers": gpus, "standby": standby},
        "retry": {"max_recoveries": 10**6},
        **spec,
    }
    full = used(gpus // 8)
    return TwinJob(
        spec=JobSpec.model_validate(document),
        gpus=gpus,
        gpus_per_node=8,
        num_params=70e9,
        find_layout=cache(lambda nodes: TwinLayout(used(nodes), STEP_S * full / used(nodes), 8 * used(nodes))),
    )


def cause(takes: Takes, **settings: Any) -> Cause:
    return Cause(name=str(takes), takes=takes, **({"per_day": 1.0, "repair_h": 24.0} | settings))


def failures_at(kind: Cause, *hours: float, draw: float = 0.3, takes_buddy: bool = False) -> list[Failure]:
    return [Failure(3600 * at, kind, draw, takes_buddy) for at in hours]


EVERYTHING = (
    cause(Takes.PROCESS, per_day=6.0),
    cause(Takes.GPU, per_day=12.0),
    cause(Takes.NODE, per_day=6.0, buddy_lost=0.2),
    cause(Takes.RACK, per_day=3.0, nodes=2),
    cause(Takes.HANG, per_day=3.0),
    cause(Takes.SLOW, per_day=2.0, slowdown=2.5, repair_h=6.0),
    cause(Takes.STORAGE, per_day=1.0, repair_h=0.5),
)


def live(
    job: TwinJob, *, seed: int, days: float = 1.0, causes: Sequence[Cause] = EVERYTHING, **options: Any
) -> TwinResult:
    failures = draw_failures(causes, gpus=job.total_gpus, nodes=job.total_nodes, days=days, seed=seed)
    return run_twin(job, failures, days, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("standby", [0, 64])
def test_every_second_is_booked_once(seed: int, standby: int) -> None:
    result = live(make_job(standby=standby), seed=seed)
    assert sum(result.terms.values()) == pytest.approx(result.seconds, abs=1e-3)
    assert all(seconds >= -1e-6 for seconds in result.terms.values()), result.terms
    assert set(result.terms) == {term.name for term in TERMS}
    assert result.num_incidents > 10 and result.terms["productive"] == pytest.approx(result.steps * STEP_S, rel=1e-6)


def test_a_seed_decides_everything() -> None:
    job = make_job()
    first, again, other = live(job, seed=1), live(job, seed=1), live(job, seed=2)
    assert first == again
    assert first.terms != other.terms


def test_without_failures_only_the_start_and_the_snapshots_cost_time() -> None:
    result = run_twin(make_job(), [], 1.0)
    costly = {name for name, seconds in result.terms.items() if seconds}
    assert costly == {"productive", "snapshots", "start", "lost"}
    assert result.terms["lost"] < STEP_S * 1.01  # the step in which the day ends
    assert result.terms["snapshots"] / result.terms["productive"] < 0.01  # snapshot.budget


def test_a_dead_process_costs_its_recovery_and_no_completed_step() -> None:
    result = run_twin(make_job(), failures_at(cause(Takes.PROCESS), 10.01), 1.0)
    (seconds,) = result.recovery_s
    spent = COSTS.death_s + COSTS.find_leave_s(4096) + COSTS.find_form_s(4096, 4096) + COSTS.first_step_s
    assert seconds == pytest.approx(spent + COSTS.find_restore_s(4096, 70e9, is_durable=False) + STEP_S, rel=0.02)
    assert result.steps_lost < 3  # the step it broke, the one in which the day ends, and one that was not copied yet


def test_a_lost_node_is_replaced_by_a_spare_at_once() -> None:
    result = run_twin(make_job(standby=8), failures_at(cause(Takes.NODE), 10.01), 1.0)
    assert result.from_storage == 0 and result.steps_lost < 5
    assert result.terms["degraded"] == 0 and result.missing[-1][1] == 1


def test_without_a_spare_the_job_goes_on_smaller_until_the_repair() -> None:
    result = run_twin(make_job(standby=0), failures_at(cause(Takes.NODE, repair_h=4.0), 10.01), 1.0)
    assert result.terms["degraded"] == pytest.approx(4 * 3600 / 512, rel=0.1)
    assert result.terms["switch"] > 0  # it grows again


def test_nodes_that_the_layout_leaves_idle_are_spares() -> None:
    job = make_job(standby=0, used=lambda nodes: nodes // 16 * 16)
    larger = make_job(4096 + 64, standby=0, used=lambda nodes: nodes // 16 * 16)  # eight nodes are idle
    lost = failures_at(cause(Takes.NODE, repair_h=4.0), 10.01)
    assert run_twin(job, lost, 1.0).terms["degraded"] > 60
    assert run_twin(larger, lost, 1.0).terms["degraded"] == 0


def test_a_node_and_its_buddy_take_the_job_back_to_a_checkpoint() -> None:
    kind, job = cause(Takes.NODE), make_job(checkpoint={"every_steps": 100})
    result = run_twin(job, failures_at(kind, 10.06, takes_buddy=True), 1.0)
    assert result.from_storage == 1
    assert 4 < result.steps_lost < 105
    assert run_twin(job, failures_at(kind, 10.06), 1.0).from_storage == 0


def test_a_rack_does_not_hold_its_own_buddies() -> None:
    for nodes in (2, 8):
        result = run_twin(make_job(), failures_at(cause(Takes.RACK, nodes=nodes), 10.06), 1.0)
        assert result.from_storage == 0 and result.missing[-1][1] == nodes


def test_an_outage_of_the_storage_costs_nothing_unless_it_is_needed() -> None:
    outage = failures_at(cause(Takes.STORAGE, repair_h=1.0), 9.9)
    alone = run_twin(make_job(), outage, 1.0)
    assert alone.terms["storage"] == alone.terms["restore"] == 0
    needed = outage + failures_at(cause(Takes.NODE), 10.06, takes_buddy=True)
    patient = run_twin(make_job(checkpoint={"wait_s": 7200}), needed, 1.0)
    assert patient.terms["storage"] == pytest.approx(0.84 * 3600, rel=0.02) and not patient.ends
    assert any(end.startswith("storage_failed") for end in run_twin(make_job(), needed, 1.0).ends)


def test_a_hang_is_found_by_the_machine_and_its_rank_is_killed() -> None:
    job = make_job(health={"hang_factor": 10.0, "hang_floor_s": 3.0})
    result = run_twin(job, failures_at(cause(Takes.HANG), 10.01), 1.0)
    assert result.terms["detect"] == pytest.approx(10 * STEP_S, abs=STEP_S)
    assert result.terms["leave"] == pytest.approx(COSTS.find_leave_s(4096) + Timeouts().quiesce_s, rel=0.05)


def test_a_slow_gpu_is_replaced_after_straggler_steps() -> None:
    slow = failures_at(cause(Takes.SLOW, slowdown=3.0, repair_h=12.0), 10.01)
    replaced = run_twin(make_job(), slow, 1.0)
    assert replaced.terms["slow"] == pytest.approx(20 * 2 * STEP_S, rel=0.2)
    kept = run_twin(make_job(health={"straggler_factor": None}), slow, 1.0)
    assert kept.terms["slow"] == pytest.approx(12 * 3600 * 2 / 3, rel=0.02)


def test_the_grace_after_a_gpu_fault_does_not_grow_with_the_job() -> None:
    fault = failures_at(cause(Takes.GPU), 10.01)
    for gpus in (1024, 16384):
        assert run_twin(make_job(gpus), fault, 1.0).terms["grace"] == pytest.approx(1, abs=0.2)


def test_three_gpu_faults_at_one_step_are_no_crash_loop() -> None:
    faults = [
        Failure(36000.0 + 60 * number, cause(Takes.GPU), 0.2 + number / 10, takes_buddy=False) for number in range(3)
    ]
    result = run_twin(make_job(16384, timeouts={"form_s": 600.0}), faults, 1.0)
    assert not result.ends and result.from_storage == 0 and result.terms["productive"] > 0.95 * DAY_S


def test_a_sample_of_the_nodes_gives_the_times_of_all_of_them() -> None:
    """512 nodes, of which 24 and 96 are in the sample; then 128 nodes, and all of them."""
    lossy = tuple(kind for kind in EVERYTHING if kind.takes not in (Takes.SLOW, Takes.STORAGE))
    job, goodput = make_job(), {}
    for size in (24, 96):
        results = [live(job, seed=seed, causes=lossy, group_nodes=size) for seed in range(3)]
        goodput[size] = statistics.mean(result.goodput for result in results)
    assert goodput[24] == pytest.approx(goodput[96], abs=0.004)
    quiet = failures_at(cause(Takes.NODE), 3.01, 9.01, draw=0.6) + failures_at(cause(Takes.PROCESS), 5.01)
    few, many = (run_twin(make_job(1024), quiet, 0.5, group_nodes=size).terms for size in (24, 128))
    assert few == pytest.approx(many, abs=3.0)


def test_the_timeouts_are_those_of_the_whole_job() -> None:
    job, plain = make_job(16384), Timeouts()
    sampled = find_timeouts(job, 48)
    assert sampled.quiesce_s == plain.quiesce_s and sampled.later_s(48) == pytest.approx(later_s(16384))
    assert sampled.form_s > plain.form_s + 800  # 50 ms for each rank


def test_a_job_without_the_budget_for_its_failures_ends() -> None:
    job = make_job(retry={"max_recoveries": 2})
    result = run_twin(job, failures_at(cause(Takes.PROCESS), *range(2, 9)), 1.0)
    assert result.ends and all(end.startswith("recovery_budget") for end in result.ends)


def test_orders_grow_with_the_job_and_with_its_recoveries() -> None:
    once, twice = (run_twin(make_job(), failures_at(cause(Takes.PROCESS), *hours), 1.0) for hours in ((5,), (5, 9)))
    assert twice.orders - once.orders == pytest.approx(2 * 4096, rel=0.1)  # an interrupt and a run for each rank
