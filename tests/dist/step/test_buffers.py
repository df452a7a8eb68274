"""Buffers that a forward pass changes: as in plain torch, alike on all ranks, at every size, and after any incident."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.worlds import plain_reference
from kit.worlds.whole_states import whole
from shoal_workers.checkpoint.reader import load, read_catalogue
from shoal_workers.contract.layout import Layout, Recompute, Schedule, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

_STEPS = 5
SPEC: dict[str, Any] = {
    "task": "buffered_tasks:Buffered",
    "model": {"kinds": ["centred", "statistics"]},
    "batch": {"global_size": 15, "micro_size": 3},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 7},
    "seed": 7,
}
PLAN = {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24}
STAGED: dict[str, Any] = {**SPEC, "task": "buffered_tasks:Staged", "model": {}, "plan": PLAN}


def _finish(job: Any, workers: Any, **changes: Any) -> None:
    job.finish(workers, **changes)


def _saved(job: Any) -> dict[str, torch.Tensor]:
    """The model's buffers in the last checkpoint."""
    catalogue, _ = read_catalogue(job.committed[-1])
    state = {name: torch.empty_like(one, device="cpu") for name, one in catalogue.items() if name.startswith("model.")}
    load(state, directory=job.committed[-1])
    return {name.removeprefix("model."): value for name, value in state.items()}


def _assert_as_in_plain_torch(job: Any, workers: Any, spec: dict[str, Any]) -> None:
    """The losses of the steps that these workers have reported."""
    saved, model = _saved(job), plain_reference.train(spec, _STEPS)[3]
    buffers = {name: value for name, value in model.named_buffers() if name in model.state_dict()}
    assert buffers
    differing = [
        f"{name}: {saved[name].flatten()[-3:].tolist()} for {value.flatten()[-3:].tolist()}"
        for name, value in buffers.items()
        if not torch.allclose(saved[name].double(), value.double(), rtol=2e-6, atol=3e-7)
    ]
    assert differing == []
    validation, seen = plain_reference.validation_loss(spec, _STEPS)
    losses = job.losses(workers)
    assert max(losses) == _STEPS
    assert losses == pytest.approx({step: values[0] for step, values in seen.items() if step in losses}, abs=2e-6)
    reported = [one.loss for one in job.reported(workers, ValidationReport)]
    assert reported[-1] == pytest.approx(validation, abs=2e-6)


def _run(make_job: Any, name: str, layout: Layout, **spec: Any) -> tuple[Any, Any]:
    job = make_job(name, **spec)
    workers = job.workers(layout.world_size)
    for worker in workers:
        worker.strike("forward", _STEPS - 1, "dump")
    _finish(job, workers, layout=layout)
    whole([worker.dumped() for worker in workers])  # asserts that all ranks have the same bits
    return job, workers


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_they_are_those_of_plain_torch_at_any_world_size(make_job: Any, world_size: int) -> None:
    """Five micro-batches: at 2 and 3 workers some ranks have padding."""
    _assert_as_in_plain_torch(*_run(make_job, "job", fully_sharded(world_size), **SPEC), SPEC)


@pytest.mark.parametrize("world_size", [2, 1])
def test_they_are_those_of_plain_torch_at_any_size_and_however_they_are_written(make_job: Any, world_size: int) -> None:
    spec = {**SPEC, "model": {"kinds": ["sized"]}}
    _assert_as_in_plain_torch(*_run(make_job, "job", fully_sharded(world_size), **spec), spec)


@pytest.mark.slow
def test_they_survive_the_death_of_a_rank_and_are_the_same_on_a_new_one(make_job: Any) -> None:
    """With what the model computes from its initial weights, which no checkpoint holds."""
    job = make_job(memory=True, **SPEC)
    workers = job.workers(3)
    workers[1].strike("backward", 2, "kill")
    job.start(workers)
    assert workers[1].died()
    survivors = [workers[0], workers[2]]
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == 2
    source = job.lose(survivors, survivors[1], "forward", 3, restore_snapshot=source)
    group = [survivors[0], *job.workers(1)]
    _finish(job, group, restore_snapshot=source)
    _assert_as_in_plain_torch(job, group, SPEC)


@pytest.mark.slow
def test_they_survive_the_death_of_all_workers(make_job: Any) -> None:
    job = make_job(**{**SPEC, "checkpoint": {"every_steps": 3}})
    workers = job.workers(3)
    for worker in workers:
        worker.strike("forward", 4, "hold")
    job.start(workers)
    for worker in workers:
        worker.reached()
    job.wait_until_committed(workers, 3)
    for worker in workers:
        worker.kill()
    fresh = job.workers(2)
    _finish(job, fresh)
    _assert_as_in_plain_torch(job, fresh, SPEC)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, schedule=Schedule.ONE_F_ONE_B),
        Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)),
        Layout(dp_shard=3, recompute=Recompute.FULL),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(tp=2, dp_shard=2),
    ],
    ids=["pipeline", "v", "recompute", "replicas", "tensor"],
)
def test_they_are_those_of_plain_torch_in_any_layout(make_job: Any, layout: Layout) -> None:
    _assert_as_in_plain_torch(*_run(make_job, "job", layout, **STAGED), STAGED)


@pytest.mark.slow
def test_in_deterministic_mode_they_have_the_same_bits_at_every_world_size(make_job: Any) -> None:
    spec = {**SPEC, "deterministic": True}
    (one, one_workers), (three, three_workers) = (_run(make_job, f"w{n}", fully_sharded(n), **spec) for n in (1, 3))
    assert one.losses(one_workers) == three.losses(three_workers)
    first, second = _saved(one), _saved(three)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    _assert_as_in_plain_torch(one, one_workers, SPEC)


@pytest.mark.parametrize("kind", ["rare", "rare_small"])
def test_a_buffer_that_one_rank_changes_late_repeats_the_step(make_job: Any, kind: str) -> None:
    """It is written through `data`, which torch does not count."""
    spec = {**SPEC, "model": {"kinds": [kind]}}
    for world_size in (1, 3):
        _assert_as_in_plain_torch(*_run(make_job, f"w{world_size}", fully_sharded(world_size), **spec), spec)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("forgotten", "changes the buffer 'odd' of Odd, and checkpoints do not hold it (persistent=False)"),
        ("infinite", "changes the buffer 'odd' of Odd, and it has values that are not finite"),
        ("grows", "changes the buffer 'odd' of Odd from float32 [3] to float32 [6]"),
        ("late", "registers the buffer 'mask' of Odd, which checkpoints would hold"),
        ("state", "trains another model than one process: "),
    ],
)
def test_what_cannot_be_added_up_ends_the_run_in_words_before_the_first_step(
    make_job: Any, way: str, said: str
) -> None:
    job = make_job(**{**SPEC, "task": "buffered_tasks:Wayward", "model": {"way": way}})
    workers = job.workers(2)
    exits = job.run(workers)
    errors = [one.error for one in exits if one.error is not None and one.kind is ExitKind.USER_ERROR]
    assert errors and all(said in error.message for error in errors), [one.error for one in exits]
    assert job.reported(workers, StepReport) == []


@pytest.mark.parametrize("way", ["cache", "notes", "average", "count"])
def test_a_cache_is_made_anew_and_notes_that_nobody_reads_are_free(make_job: Any, way: str) -> None:
    spec = {**SPEC, "task": "buffered_tasks:Wayward", "model": {"way": way}}
    job = make_job(**spec)
    workers = job.workers(2)
    _finish(job, workers)
    seen = plain_reference.losses(spec, _STEPS)
    assert job.losses(workers) == pytest.approx({step: values[0] for step, values in seen.items()}, abs=1e-5)


def test_a_counter_outside_of_the_stages_is_refused(make_job: Any) -> None:
    job = make_job(**{**STAGED, "model": {"counts": True}})
    workers = job.workers(2)
    exits = job.run(workers, layout=Layout(pp=2, schedule=Schedule.ONE_F_ONE_B))
    errors = [one.error for one in exits if one.error is not None and one.kind is ExitKind.USER_ERROR]
    assert errors and all("'calls' of StagedModel, and several stages" in one.message for one in errors)
