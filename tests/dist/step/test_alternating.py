"""Alternating updates of several optimizers: those of a plain loop with as many torch optimizers, at every size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_workers.contract.batch_partition import sample_at, sample_positions
from shoal_workers.contract.layout import Layout, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

STEPS = 8
SEED = 7
SPEC: dict[str, Any] = {
    "task": "alternating_tasks:Gan",
    "batch": {"global_size": 15, "micro_size": 3},
    "optimizer": {"name": "adam", "lr": 0.02, "clip_norm": 0.4, "beta1": 0.5, "beta2": 0.9, "eps": 1e-4},
    "schedule": {"name": "constant", "warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "seed": SEED,
}
TWO_TO_ONE = {**SPEC, "model": {"updates": ["d", "d", "g"]}}


def plain(updates: list[str]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each update of a plain loop: the whole batch at once, and two optimizers."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2] / "kit" / "tasks"))
    try:
        import alternating_tasks  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    torch.manual_seed(SEED)
    model = alternating_tasks.Pair()
    data = alternating_tasks.Points()
    parts = {"d": model.judge, "g": model.maker}
    kinds = {
        name: torch.optim.Adam(part.parameters(), lr=0.02, betas=(0.5, 0.9), eps=1e-4) for name, part in parts.items()
    }
    number, served, seen = -1, {"d", "g"}, []
    num_made = 0
    for step in range(STEPS):
        name = updates[step % len(updates)]
        if name in served or step % len(updates) == 0:
            number, served = number + 1, set()
        served.add(name)
        positions = sample_positions(number, 0, global_size=15, micro_size=15)
        samples = [data[sample_at(one, num_samples=len(data), seed=SEED)] for one in positions]
        points, noise = (torch.stack(one) for one in zip(*samples, strict=True))
        model.zero_grad()
        if name == "d":
            made = model.maker(noise).detach()
            loss = torch.nn.functional.softplus(-model.judge(points)).mean()
            loss = loss + torch.nn.functional.softplus(model.judge(made)).mean()
        else:
            loss = torch.nn.functional.softplus(-model.judge(model.maker(noise))).mean()
            loss = loss * (2.0 if num_made % 3 == 2 else 1.0)
            num_made += 1
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parts[name].parameters(), 0.4)
        for group in kinds[name].param_groups:
            group["lr"] = 0.02 * min(1.0, (step + 1) / 2)
        kinds[name].step()
        seen.append((float(loss.detach()), float(norm)))
    return seen


def assert_as_plain(reports: list[StepReport], updates: list[str]) -> None:
    expected = plain(updates)
    assert reports and reports[-1].step == STEPS
    for one in reports:
        assert (one.loss, one.grad_norm) == pytest.approx(expected[one.step - 1], rel=1e-6, abs=1e-6), one.step
        name = updates[(one.step - 1) % len(updates)]
        assert set(one.metrics) == {f"loss_{name}"} | ({"correct"} if name == "d" else set())
        assert one.metrics[f"loss_{name}"] == pytest.approx(one.loss, rel=1e-6)


def run(make_job: Any, layout: Layout, name: str = "job", **spec: Any) -> list[StepReport]:
    job = make_job(name, **spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    return list(job.reported(workers, StepReport))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=1),
        Layout(dp_shard=2),
        Layout(dp_shard=3),
        Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER),
        Layout(dp_shard=2, dp_replicate=2),
    ],
    ids=lambda one: f"{one.describe()} {one.shard}",
)
def test_every_layout_of_the_data_axes_trains_as_a_plain_loop_with_two_optimizers(
    make_job: Any, layout: Layout
) -> None:
    assert_as_plain(run(make_job, layout, **SPEC), ["d", "g"])


def test_an_optimizer_that_is_updated_twice_in_a_round_gets_a_new_batch(make_job: Any) -> None:
    assert_as_plain(run(make_job, fully_sharded(2), **TWO_TO_ONE), ["d", "d", "g"])


def test_in_deterministic_mode_every_size_has_the_same_bits(make_job: Any) -> None:
    one, three = (run(make_job, fully_sharded(size), f"w{size}", **{**SPEC, "deterministic": True}) for size in (1, 3))
    assert [(step.loss, step.grad_norm) for step in one] == [(step.loss, step.grad_norm) for step in three]
    assert_as_plain(one, ["d", "g"])


def test_an_epoch_ends_when_its_batches_have_served_all_updates(make_job: Any) -> None:
    """60 samples are 4 batches; those of two rounds with two batches each are 6 updates."""
    reports = run(make_job, fully_sharded(1), **{**TWO_TO_ONE, "stop": {"epochs": 1}})
    assert reports[-1].step == 6


@pytest.mark.parametrize("step", [4, 5])
def test_a_kill_between_the_updates_of_a_round_and_a_resize_change_nothing(make_job: Any, step: int) -> None:
    job = make_job(memory=True, **{**TWO_TO_ONE, "snapshot": {"budget": 1.0}})
    workers = job.workers(3)
    workers[1].strike("backward", step, "kill")
    job.start(workers)
    assert workers[1].died()
    survivors = [workers[0], workers[2]]
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == step, "no completed update is lost"
    job.finish(survivors, restore_snapshot=source)
    assert_as_plain(job.reported(survivors, StepReport), ["d", "d", "g"])


def test_a_checkpoint_of_three_workers_goes_on_with_one(make_job: Any) -> None:
    job = make_job(**{**TWO_TO_ONE, "checkpoint": {"every_steps": 4}})
    workers = job.workers(3)
    for worker in workers:
        worker.strike("forward", 5, "hold")
    job.start(workers)
    for worker in workers:
        worker.reached()
    job.wait_until_committed(workers, 4)
    for worker in workers:
        worker.kill()
    fresh = job.workers(1)
    ends = job.run(fresh)
    assert [end.kind for end in ends] == [ExitKind.FINISHED], [end.error for end in ends]
    reports = job.reported(fresh, StepReport)
    assert reports[0].step == 5
    assert_as_plain(reports, ["d", "d", "g"])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("NoOptimizers", "Name them with the parameters that each updates"),
        ("Unowned", "'maker.2.weight' belongs to none of the optimizers d, g"),
        ("OwnedTwice", "'judge.2.weight' belongs to the optimizers d and g"),
        ("NoSuchName", "optimizers['d'] is 'critic.*', which matches no parameter"),
        ("OneLoss", "must return a dict with a loss for each optimizer"),
        ("OtherLoss", "returned no loss for the optimizer 'd', which this step updates"),
        ("LeftOut", "a list in which each name of optimizers ('d', 'g') stands at least once"),
    ],
)
def test_what_is_no_alternation_is_refused_in_words(make_job: Any, kind: str, words: str) -> None:
    job = make_job(**{**SPEC, "task": f"alternating_tasks:{kind}"})
    (end,) = job.run(job.workers(1), layout=Layout())
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert words in end.error.message
