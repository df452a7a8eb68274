"""Collectives of all ranks along the axes of the mesh, as with NCCL: the results of one group, and none on the default
group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.tasks import biased_tasks
from kit.worlds import layout_cases
from shoal_workers.contract.layout import Layout, plain
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import ReplicasEqual, StepReport, ValidationReport

ROOT = Path(__file__).parents[3]
HSDP = Layout(dp_replicate=2, dp_shard=2)
MESHES = {
    4: [{"dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}],
    6: [{"dp_replicate": 2, "dp_shard": 3}, {"pp": 3, "tp": 2}],
    8: [{"pp": 2, "dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}],
}
COUNTING: dict[str, Any] = {
    "task": "metered_tasks:Metered",
    "batch": {"global_size": 8, "micro_size": 1},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": 2},
    "validation": {"samples": 5, "every_steps": 3},
    "elasticity": {"max_workers": 4},
    "health": {"checksum_every_steps": 2},
    "seed": 7,
}
BIASED = {**COUNTING, "task": "biased_tasks:Biased", "plan": biased_tasks.PLAN}
SYNCED = {
    **COUNTING,
    "task": "synced_tasks:Task",
    "batch": {"global_size": 8, "micro_size": 1, "sync": "global"},
    "health": {},
}


def dense(text: str, model: str = "dense") -> dict[str, Any]:
    spec = layout_cases.spec_of(model, text, batch={"global_size": 8, "micro_size": 1}, stop={"steps": 4})
    return {**spec, "checkpoint": {"every_steps": 2}}


CASES: dict[str, tuple[Callable[[str], dict[str, Any]], Layout]] = {
    "dp_replicate x dp_shard": (lambda text: COUNTING, HSDP),
    "global statistics": (lambda text: SYNCED, HSDP),
    "dp x tp": (lambda text: BIASED, Layout(dp_shard=2, tp=2)),
    "pp x dp": (dense, Layout(pp=2, dp_shard=2)),
    "cp x dp": (dense, Layout(dp_replicate=2, cp=2)),
    "ep": (lambda text: dense(text, "experts"), Layout(dp_replicate=2, dp_shard=2, ep=2)),
}


@pytest.mark.parametrize("world", MESHES)
def test_a_collective_along_the_axes_has_the_result_of_one_group(answer_of: Any, world: int) -> None:
    """The same bits, but sums of several summands that are no integers: these have the same bits on all ranks."""
    for found in answer_of("all_ranks.py", world, json.dumps(MESHES[world])):
        assert found.pop("difference") < 1e-15
        assert found and all(found.values()), found


def watch(workers: list[Any]) -> None:
    for worker in workers:
        worker.call("call", "kit.processes.default_group:watch")


def uses_default_group(workers: list[Any]) -> bool:
    """Return whether the workers had collectives on it in all of their generations; False if in none."""
    counts = [count for worker in workers for count in worker.call("call", "kit.processes.default_group:counts")]
    assert len(counts) >= len(workers), "one for each generation"
    assert all(counts) or not any(counts), counts
    return all(counts)


def results(job: Any, workers: list[Any]) -> dict[Any, Any]:
    steps = {r.step: (r.loss, r.grad_norm, *r.metrics.values()) for r in job.reported(workers[:1], StepReport)}
    validated = {f"validation {r.step}": r.loss for r in job.reported(workers[:1], ValidationReport)}
    return steps | validated


@pytest.mark.parametrize("case", CASES)
def test_a_job_trains_along_the_axes_as_in_one_group_and_calls_nothing_on_the_default_group(
    make_job: Any, text: str, case: str
) -> None:
    """Two runs of one generation each that stops in the middle, and one that restores its checkpoint."""
    make_spec, layout = CASES[case]
    found = []
    for by_axis in (False, True):
        job = make_job(f"by axis {by_axis}", by_axis=by_axis, **make_spec(text))
        workers = job.workers(layout.world_size)
        watch(workers)
        workers[0].strike("forward", 1, "report")
        job.start(workers, layout=layout)
        workers[0].reached()
        for worker in workers:
            worker.call("request_yield", job.generation)
        assert {worker.exit().kind for worker in workers} == {ExitKind.YIELDED}
        job.commit(workers)
        job.finish(workers, layout=layout)
        found.append(results(job, workers))
        assert uses_default_group(workers) is not by_axis
        if job.spec.get("health"):
            assert job.reported(workers[:1], ReplicasEqual) or layout.dp_replicate == 1
    in_one_group, along_axes = found
    assert along_axes.keys() == in_one_group.keys() and len(along_axes) > 4
    for key, values in along_axes.items():
        assert values == pytest.approx(in_one_group[key], rel=1e-10), key


@pytest.mark.parametrize("how", ["wrap", "whole"])
def test_a_loop_trains_along_the_axes_as_in_one_group(make_job: Any, how: str) -> None:
    """Also one that shards nothing: its gradients are summed along two axes, in groups of their own."""
    file = (ROOT / "tests" / "kit" / "loops" / "blocks.py").relative_to(ROOT)
    spec = {
        "task": None,
        "loop": {"file": str(file), "args": ["8", how]},
        "elasticity": {"max_workers": 4},
        "parallelism": {"dp_shard": "auto"},
    }
    losses = []
    for by_axis in (False, True):
        job = make_job(f"by axis {by_axis}", by_axis=by_axis, **spec)
        workers = job.workers(4)
        watch(workers)
        job.finish(workers, layout=HSDP)
        losses.append(job.losses(workers))
        assert uses_default_group(workers) is not by_axis
    assert losses[1] == pytest.approx(losses[0], abs=3e-7)


def test_a_loop_gathers_along_the_axes(make_job: Any) -> None:
    file = (ROOT / "tests" / "kit" / "loops" / "contrastive.py").relative_to(ROOT)
    spec = {"task": None, "loop": {"file": str(file), "args": []}, "elasticity": {"max_workers": 4}}
    losses = []
    for by_axis in (False, True):
        job = make_job(f"by axis {by_axis}", by_axis=by_axis, **spec, parallelism={"dp_shard": "auto"})
        workers = job.workers(4)
        watch(workers)
        job.finish(workers, layout=HSDP)
        losses.append(job.losses(workers))
        assert uses_default_group(workers) is not by_axis
    assert losses[1] == pytest.approx(losses[0], abs=3e-7)


@pytest.mark.parametrize(("fail", "kind"), [("loss", ExitKind.USER_ERROR), ("nan", ExitKind.NON_FINITE)])
def test_a_failure_ends_all_ranks_along_the_axes(make_job: Any, fail: str, kind: ExitKind) -> None:
    job = make_job(by_axis=True, **{**COUNTING, "task": "tiny_tasks:Failing", "model": {"fail": fail, "on": 20}})
    workers = job.workers(4)
    watch(workers)
    job.start(workers, layout=HSDP)
    if fail == "loss":
        job.wait_for_an_exit()
        for worker in workers:
            worker.call("interrupt", job.generation)
    kinds = [worker.exit().kind for worker in workers]
    assert kind in kinds and set(kinds) <= {kind, ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
    assert not uses_default_group(workers)


def test_a_dead_rank_frees_the_others_and_the_group_that_follows_repeats_one_step_at_most(
    make_job: Any, reference: Any
) -> None:
    spec = {key: value for key, value in COUNTING.items() if key != "task"}
    job = make_job(memory=True, by_axis=True, **spec)
    workers = job.workers(4)
    source = job.lose(workers, workers[3], "backward", 3, layout=HSDP)
    survivors = workers[:3]
    watch(survivors)
    job.finish(survivors, layout=plain(3), restore_snapshot=source, restore_from=None)
    assert job.losses(survivors) == pytest.approx(reference(6, **spec), abs=1e-5)
