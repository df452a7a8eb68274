"""A bit that flips in the memory of one replica is found at the next comparison, and an honest group never is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kit.processes.fleet import PATIENCE_S
from shoal_workers.contract.layout import Layout, plain
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import ReplicaMismatch, ReplicasEqual

STEPS, EVERY = 10, 4
BIASED_PLAN: dict[str, Any] = {
    "blocks": "blocks",
    "num_blocks": 2,
    "first": ["inlet"],
    "last": ["outlet"],
    "hidden_size": 12,
    "tensor": {"blocks.*.up": "column", "blocks.*.down": "row"},
}
SPEC: dict[str, Any] = {
    "batch": {"global_size": 12, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "health": {"checksum_every_steps": EVERY},
}
LEFT = {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
"""A rank may still be in the exchange that showed the fault when another one has left it."""


def differences(workers: list[Any]) -> list[ReplicaMismatch]:
    return [item for worker in workers for item in worker.poll() if isinstance(item, ReplicaMismatch)]


def compared(workers: list[Any]) -> list[int]:
    return [item.step for worker in workers for item in worker.poll() if isinstance(item, ReplicasEqual)]


def wait_for_difference(workers: list[Any]) -> ReplicaMismatch:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := differences(workers[:1])):
        assert time.monotonic() < deadline
    [one] = found
    return one


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("memory", [True, False])
def test_a_flipped_bit_is_found_within_k_steps_and_the_result_is_that_of_the_undisturbed_run(
    make_job: Any, reference: Any, wrong: int, memory: bool
) -> None:
    job = make_job(memory=memory, **SPEC)
    workers = job.workers(3)
    workers[wrong].strike("forward", 5, "flip")
    job.start(workers, layout=Layout(dp_replicate=3))
    found = wait_for_difference(workers)
    assert (found.ranks, found.is_certain, found.step) == ((wrong,), True, 8), "at most 4 steps after the flip"
    assert compared(workers[:1]) == [EVERY], "the comparison before was clean"
    survivors = [worker for worker in workers if worker is not workers[wrong]]
    job.wait_until_committed(workers, 8)
    workers[wrong].kill()
    exits = job.interrupt(survivors)
    assert {e.kind for e in exits} <= LEFT and [e.step for e in exits] == [8] * 2, "step 9 was not applied"
    trusted = next(directory for directory in job.committed if "step-000000000004" in directory)
    ended = job.run(survivors, layout=Layout(dp_replicate=2), restore_from=trusted)
    assert [e.kind for e in ended] == [ExitKind.FINISHED] * 2
    again = {report.step: report.loss for report in job.reports(survivors[0])}
    expected = reference(STEPS, **SPEC)
    assert again == pytest.approx({step: expected[step] for step in range(5, STEPS + 1)}, abs=1e-5)


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), plain(2)], ids=["fsdp", "plain"])
def test_two_replicas_are_both_suspected(make_job: Any, layout: Layout) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(2)
    workers[1].strike("forward", 1, "flip")
    job.start(workers, layout=layout)
    found = wait_for_difference(workers)
    exits = job.interrupt(workers)
    assert {e.kind for e in exits} <= LEFT and [e.step for e in exits] == [EVERY] * 2
    assert differences(workers) == [found]
    assert (found.ranks, found.is_certain) == ((0, 1), False)


def test_a_bit_that_flips_after_the_last_comparison_is_found_before_the_result_is_saved(make_job: Any) -> None:
    job = make_job(memory=True, **{**SPEC, "checkpoint": {"every_steps": None}})
    workers = job.workers(3)
    workers[1].strike("forward", STEPS - 1, "flip")
    job.start(workers, layout=Layout(dp_replicate=3))
    found = wait_for_difference(workers)
    assert (found.ranks, found.step) == ((1,), STEPS)
    assert {e.kind for e in job.interrupt(workers)} <= LEFT
    assert differences(workers) == [found]
    job.commit(workers)
    assert job.committed == []


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2, dp_shard=2), Layout(dp_replicate=4), Layout(dp_replicate=2), plain(3)],
    ids=Layout.describe,
)
def test_an_honest_group_is_equal_at_each_comparison(make_job: Any, reference: Any, layout: Layout) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    assert compared(workers) == [4, 8, STEPS] and differences(workers) == []
    assert job.losses(workers) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


def test_an_optimizer_that_is_made_of_a_set_has_its_parameters_in_another_order_on_each_rank(make_job: Any) -> None:
    spec = {**SPEC, "task": "carrying_tasks:Shuffled", "model": {"keeps": False}, "optimizer": {}}
    job = make_job(**spec)
    workers = job.workers(2)
    job.start(workers, layout=plain(2))
    ends = [worker.exit(timeout_s=60.0) for worker in workers]
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 2, ends
    assert differences(workers) == []


@pytest.mark.parametrize("parameter", ["inlet.weight", "blocks.0.down.bias"])
def test_a_parameter_that_tp_does_not_split_is_compared_over_tp(make_job: Any, parameter: str) -> None:
    job = make_job(memory=True, **{**SPEC, "task": "biased_tasks:Biased", "plan": BIASED_PLAN})
    workers = job.workers(2)
    workers[1].strike("forward", 1, f"flip in {parameter}")
    job.start(workers, layout=Layout(tp=2))
    found = wait_for_difference(workers)
    assert {e.kind for e in job.interrupt(workers)} <= LEFT
    assert (found.ranks, found.is_certain, found.step) == ((0, 1), False, EVERY)
