"""`reduce_precision: int8`: gradients are sent as 8-bit numbers, and the job is that of a plain loop that does so."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from kit.worlds import plain_reference
from kit.worlds.plain_int8 import PlainInt8
from kit.worlds.snapshot_spec import snapshot_spec
from shoal_workers.contract.layout import Layout, ShardLevel, plain
from shoal_workers.contract.worker_reports import GroupFormed, StepReport
from shoal_workers.engine.group.rounded_sums import BLOCK

STEPS = 8
SPEC = {**snapshot_spec(STEPS), "reduce_precision": "int8"}
LONG = {**snapshot_spec(300), "reduce_precision": "int8", "optimizer": {"lr": 0.003}}


@pytest.fixture(scope="module")
def result(answer_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 of the four processes saw."""
    return answer_of("rounded_sums.py")


def test_a_sum_is_as_near_as_its_roundings_allow_and_has_the_same_bits_on_all_ranks(result: dict[str, Any]) -> None:
    assert {count: same for count, (_, same) in result["sizes"].items()} == dict.fromkeys(result["sizes"], True)
    costs = [cost for cost, _ in result["sizes"].values()]
    assert 0.05 < max(costs) <= 1
    assert 0.05 < result["scattered"] <= 1


def test_a_repeated_step_has_the_same_bits_and_the_next_one_has_others(result: dict[str, Any]) -> None:
    assert (result["same_step"], result["next_step"]) == (True, False)


def test_the_mean_of_many_sums_is_the_sum(result: dict[str, Any]) -> None:
    assert result["mean"] < 0.06


def test_a_number_that_is_not_finite_stays_so(result: dict[str, Any]) -> None:
    """With the others of its block, so that the vote refuses the step."""
    assert result["infinite"] == [*range(BLOCK), *range(2 * BLOCK, 3 * BLOCK)]


def test_an_all_reduce_moves_two_bytes_for_each_number_and_a_reduce_scatter_one(result: dict[str, Any]) -> None:
    """Each of four ranks receives three quarters of a tensor in each direction; a block has a scale of 4 bytes."""
    of_rank, coded = 3 / 4, 1 + 4 / BLOCK
    expected = {"all-reduce in fp32": 8.0, "all-reduce": 2 * coded, "reduce-scatter": coded}
    assert result["bytes"] == pytest.approx({name: of_rank * one for name, one in expected.items()}, rel=0.01)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_losses_are_those_of_a_plain_loop_that_rounds_alike(make_job: Any, world_size: int) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(world_size)
    job.finish(workers, layout=plain(world_size))
    ranks = PlainInt8(world_size, 4, SPEC["seed"])
    seen = plain_reference.train(SPEC, STEPS, ranks)[0]
    reports = job.reported(workers, StepReport)
    assert {r.step: r.loss for r in reports} == pytest.approx({s: one[0] for s, one in seen.items()}, rel=1e-5)
    assert {r.step: r.grad_norm for r in reports} == pytest.approx({s: one[1] for s, one in seen.items()}, rel=1e-5)


def test_one_worker_sends_nothing_and_rounds_nothing(make_job: Any, reference: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(1)
    job.finish(workers, layout=plain(1))
    assert job.losses(workers) == pytest.approx(reference(STEPS, **snapshot_spec(STEPS)), abs=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER),
        Layout(dp_shard=2, shard=ShardLevel.GRADIENTS),
        Layout(dp_replicate=2, dp_shard=2, shard=ShardLevel.FULL),
        Layout(dp_replicate=2, dp_shard=2, shard=ShardLevel.OPTIMIZER),
        Layout(dp_replicate=2, shard=ShardLevel.OPTIMIZER),
        Layout(dp_replicate=2, shard=ShardLevel.FULL),
        Layout(pp=2, dp_shard=2),
    ],
    ids=Layout.describe,
)
def test_sharded_models_round_what_shards_exchange(make_job: Any, reference: Any, layout: Layout) -> None:
    spec = {**SPEC, "model": {"dropout": 0.0}, "plan": {"blocks": "blocks", "num_blocks": 2, "hidden_size": 21}}
    expected = reference(STEPS, **{**spec, "reduce_precision": "fp32"})
    job = make_job(memory=True, **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    differences = [abs(loss - expected[step]) for step, loss in job.losses(workers).items()]
    assert len(differences) == STEPS
    assert 1e-3 < max(differences) < 1e-1, "rounded, and to no other model"


def test_300_steps_lose_what_uncompressed_ones_lose_and_a_kill_changes_no_bit(make_job: Any, reference: Any) -> None:
    job = make_job(memory=True, **LONG)
    workers = job.workers(2)
    job.finish(workers, layout=plain(2))
    losses, expected = job.losses(workers), reference(300, **{**LONG, "reduce_precision": "fp32"})
    last = [fmean(losses[step] for step in range(251, 301)) for losses in (losses, expected)]
    assert last[0] == pytest.approx(last[1], rel=0.01)
    assert expected[1] > 2 * last[1]

    job = make_job("killed", memory=True, **LONG)
    first, victim, spare = job.workers(3)
    victim.strike("backward", 150, "kill")
    job.start([first, victim], layout=plain(2))
    assert victim.died()
    source = job.in_memory(job.interrupt([first]), [first])
    job.finish([first, spare], layout=plain(2), restore_snapshot=source)
    assert job.reported([first], GroupFormed)[-1].start_step == 150
    assert job.losses([first, spare]) == losses


def test_a_smaller_group_goes_on_with_other_roundings(make_job: Any, reference: Any) -> None:
    """As with other short types: what is computed is rounded, and nothing of it is lost."""
    job = make_job(memory=True, **SPEC)
    workers = job.workers(3)
    source = job.lose(workers, workers[2], "forward", 4, layout=plain(3), buddy_of=lambda rank: None)
    job.finish(workers[:2], layout=plain(2), restore_snapshot=source)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **snapshot_spec(STEPS)), rel=5e-3)


def test_replicas_of_shards_lose_no_bit_by_a_kill(make_job: Any) -> None:
    """They add up in fp32 over the shards of a node and in 8 bits between nodes; the groups are new after the kill."""
    layout = Layout(dp_replicate=2, dp_shard=2, shard=ShardLevel.OPTIMIZER)
    job = make_job(memory=True, **SPEC)
    workers = job.workers(4)
    job.finish(workers, layout=layout)
    undisturbed = job.losses(workers)

    job = make_job("killed", memory=True, **SPEC)
    *group, victim, spare = job.workers(5)
    source = job.lose([*group, victim], victim, "backward", 4, layout=layout)
    job.finish([*group, spare], layout=layout, restore_snapshot=source)
    assert job.reported(group[:1], GroupFormed)[-1].start_step == 4
    assert job.losses([*group, spare]) == undisturbed
