"""An optimizer that a spec names gives the losses of torch's own in one process, at every world size and after a
death."""

from __future__ import annotations

from typing import Any

import pytest

from kit.tasks import biased_tasks
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotCost

STEPS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 12, "micro_size": 2},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1e-6},
    "seed": 3,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.3, "weight_decay": 0.01, "args": {"momentum": 0.9, "nesterov": True}},
    "sgd-dampened": {"name": "sgd", "lr": 0.3, "args": {"momentum": 0.9, "dampening": 0.5}},
    "adam": {"name": "adam", "lr": 0.01, "weight_decay": 0.01},
    "lion": {"name": "lion", "lr": 0.001},
    "adagrad": {"name": "adagrad", "lr": 0.05},
    "rmsprop": {"name": "rmsprop", "lr": 0.005, "args": {"momentum": 0.5}},
    "muon": {"name": "muon", "lr": 0.01},
    "adafactor": {"name": "adafactor", "lr": 0.05, "weight_decay": 0.01},
    "radam": {"name": "torch.optim.RAdam", "lr": 0.02, "args": {"betas": [0.8, 0.99]}},
}
ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("muon", "adafactor")]


@pytest.mark.parametrize(
    "layout",
    [fully_sharded(1), Layout(dp_replicate=2), fully_sharded(2), Layout(dp_replicate=3), fully_sharded(3)],
    ids=Layout.describe,
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_torch_in_one_process(make_job: Any, reference: Any, name: str, layout: Layout) -> None:
    spec = {**SPEC, "optimizer": {"clip_norm": 0.5, **OPTIMIZERS[name]}}
    job = make_job(**spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), rel=1e-6, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_shard=2, tp=2)], ids=Layout.describe)
@pytest.mark.parametrize("name", ["sgd", "muon", "adafactor"])
def test_a_tensor_that_tp_and_shards_both_split_is_updated_as_the_whole_one(
    make_job: Any, reference: Any, name: str, layout: Layout
) -> None:
    spec = {**SPEC, "task": "biased_tasks:Biased", "plan": biased_tasks.PLAN, "optimizer": OPTIMIZERS[name]}
    job = make_job(**spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), rel=1e-4 if name == "muon" else 2e-6)


GROUPS = [
    {"match": "embed.*", "lr_factor": 0.3, "weight_decay": 0.0},
    {"match": "blocks.0.*", "frozen": True},
    {"match": "*.bias", "lr": 0.03, "weight_decay": 0.2},
]
GROUPED: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.02, "groups": GROUPS},
    "sgd": {**OPTIMIZERS["sgd"], "groups": GROUPS},
    "muon": {**OPTIMIZERS["muon"], "groups": [*GROUPS[1:], {"match": "blocks.1.up.*", "muon": False}]},
}
PLAN = {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(dp_replicate=2), marks=pytest.mark.matrix),
        pytest.param(fully_sharded(3), marks=pytest.mark.matrix),
        Layout(pp=2, schedule=Schedule.ONE_F_ONE_B, shard=ShardLevel.OPTIMIZER),
    ],
    ids=Layout.describe,
)
@pytest.mark.parametrize("name", ["adamw", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("sgd", "muon"))])
def test_groups_of_the_spec_are_those_of_torch_in_every_stage(
    make_job: Any, reference: Any, name: str, layout: Layout
) -> None:
    """The first block is frozen, and a stage sees some of the parameters only."""
    spec = {**SPEC, "task": "metered_tasks:Staged", "model": {}, "plan": PLAN, "optimizer": GROUPED[name]}
    job = make_job(**spec)
    workers = job.workers(layout.world_size)
    job.finish(workers, layout=layout)
    # Muon computes in bf16, where a last bit of a sum may round an element to its neighbour.
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), rel=1e-4 if name == "muon" else 1e-6)


def _killed(make_job: Any, spec: dict[str, Any]) -> tuple[int, SnapshotCost, dict[int, float]]:
    """The step to which the group goes back if a worker dies after five steps, and the first report of snapshots."""
    job = make_job(memory=True, **spec)
    survivor, source = job.lose_one_of_two("forward", 5)
    assert [end.kind for end in job.run([survivor], restore_snapshot=source)] == [ExitKind.FINISHED]
    return source.step, job.reported([survivor], SnapshotCost)[0], job.losses([survivor])


@pytest.mark.parametrize(
    "name", ["sgd", *(pytest.param(one, marks=pytest.mark.matrix) for one in ELEMENTWISE if one != "sgd")]
)
def test_a_death_repeats_no_completed_step_with_an_elementwise_one(make_job: Any, reference: Any, name: str) -> None:
    spec = {**SPEC, "optimizer": OPTIMIZERS[name]}
    step, cost, losses = _killed(make_job, spec)
    assert (step, cost.copies_reason) == (5, "")
    plain = reference(STEPS, **spec)
    assert losses == pytest.approx({step: plain[step] for step in losses}, rel=1e-6, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_death_goes_back_to_the_last_copies_with_one_of_whole_tensors(
    make_job: Any, reference: Any, name: str
) -> None:
    spec = {**SPEC, "optimizer": OPTIMIZERS[name], "snapshot": {"budget": 0.5}}
    step, cost, losses = _killed(make_job, spec)
    assert 0 < step <= 5 and "is not elementwise" in cost.copies_reason
    plain = reference(STEPS, **spec)
    assert losses == pytest.approx({step: plain[step] for step in losses}, rel=1e-6, abs=1e-6)
    assert max(losses) == STEPS


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"groups": [{"match": "block.*", "lr": 1.0}]}, "optimizer.groups.0.match 'block.*' matches no parameter"),
        ({"name": "sgd", "args": {"momentum": -1}}, "optimizer.args {'momentum': -1}: sgd refuses them: Invalid"),
        ({"name": "no_such_module.Own"}, "optimizer.name no_such_module.Own: "),
        ({"schedule": {"name": "no_such_module.Own"}}, "schedule.name no_such_module.Own cannot be imported here"),
    ],
)
def test_what_only_a_worker_can_see_ends_the_job_before_its_first_step(
    make_job: Any, optimizer: dict[str, Any], words: str
) -> None:
    sections = optimizer if "schedule" in optimizer else {"optimizer": optimizer}
    job = make_job(**{**SPEC, **sections})
    [end] = job.run(job.workers(1))
    assert end.kind is ExitKind.USER_ERROR and end.step == 0
    assert words in end.error.message
