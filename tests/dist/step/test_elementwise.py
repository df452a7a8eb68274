"""Which optimizers may run on local shards, and be stepped again elsewhere, is found out without a promise."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, NAdam, Optimizer

from shoal_workers.contract.layout import plain
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotCost
from shoal_workers.engine.step.elementwise import _try_out, why_not_elementwise

sys.path.append(str(Path(__file__).parents[2] / "kit" / "tasks"))
import own_optimizers as own

STEPS = 8
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1e-6},
    "seed": 3,
}
NOT_ELEMENTWISE = {
    "Clipped": "linalg_vector_norm",
    "EveryTenth": "mean",
    "Counted": "'count' changes with its steps",
    "Scheduled": "settings of its groups",
    "Noisy": "random numbers",
    "Timed": "depends on more than gradients",
    "ByIndex": "a piece of a parameter gets other values",
    "ThroughNumpy": "a piece of a parameter gets other values",
    "Broken": "KeyError: 'only on a cluster'",
    "Factored": "mean",
}


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (300, 200), (17,), (3, 3, 2))]


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_what_an_optimizer_does_beside_elements_is_found_and_named(name: str) -> None:
    before = torch.get_rng_state()
    reason = why_not_elementwise(getattr(own, name)(_parameters(), lr=0.1))
    assert name in reason and NOT_ELEMENTWISE[name] in reason, reason
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_constructor_was_given_must_be_among_the_defaults() -> None:
    assert why_not_elementwise(own.Hidden(_parameters(), lr=0.1)) == ""
    assert "'factor'" in why_not_elementwise(own.Hidden(_parameters(), lr=0.1, factor=2.0))


def test_a_step_that_something_is_hooked_into_is_not_known() -> None:
    optimizer = SGD(_parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    assert "hooked" in why_not_elementwise(optimizer)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"momentum": 0.9, "foreach": True}),
        (AdamW, {"amsgrad": True, "maximize": True}),
        (AdamW, {"fused": True}),
        (AdamW, {"lr": torch.tensor(1e-3)}),
        (Adagrad, {}),
        (NAdam, {}),
        (own.Lion, {"weight_decay": 0.1}),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_elementwise_optimizers_pass_the_trial(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    """Also those of torch, for which it is not needed."""
    optimizer = kind(_parameters(), **settings)  # type: ignore[call-arg]
    assert _try_out(optimizer) == why_not_elementwise(optimizer) == ""


def test_optimizers_of_torch_that_are_not_elementwise_are_known_and_fail_the_trial() -> None:
    for optimizer in (Adafactor(_parameters()), Muon(_parameters()[:2])):
        assert _try_out(optimizer) and "is not elementwise" in why_not_elementwise(optimizer)


def _killed(make_job: Any, **spec: Any) -> tuple[int, SnapshotCost, dict[int, float]]:
    """The step to which the group goes back if a worker dies after six steps, and the first report of snapshots."""
    job = make_job(memory=True, **{**SPEC, **spec})
    survivor, source = job.lose_one_of_two("forward", 6)
    assert [end.kind for end in job.run([survivor], restore_snapshot=source)] == [ExitKind.FINISHED]
    return source.step, job.reported([survivor], SnapshotCost)[0], job.losses([survivor])


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("own_optimizers:Own", {"optimizer": "Lion"}),
        pytest.param("own_optimizers:TensorRate", {}, marks=pytest.mark.matrix),
    ],
)
def test_a_death_repeats_no_completed_step_with_an_optimizer_that_is_elementwise(
    make_job: Any, reference: Any, task: str, model: dict[str, Any]
) -> None:
    step, cost, losses = _killed(make_job, task=task, model=model)
    assert (step, cost.copies_reason) == (6, "")
    plain = reference(STEPS, **{**SPEC, "task": task, "model": model})
    assert losses == pytest.approx({step: plain[step] for step in losses}, abs=1e-5)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("own_optimizers:Denied", "elementwise_optimizer = False"),
        ("own_optimizers:Own", "linalg_vector_norm"),
        ("own_optimizers:Keeping", "keeps the optimizer"),
        pytest.param("own_optimizers:KeepingGroup", "keeps the optimizer", marks=pytest.mark.matrix),
    ],
)
def test_with_another_one_the_report_says_why_snapshots_are_copies(make_job: Any, task: str, reason: str) -> None:
    _, cost, _ = _killed(make_job, task=task, model={"optimizer": "Clipped"}, snapshot={"budget": 0.5})
    assert reason in cost.copies_reason


def test_a_class_with_the_id_of_one_that_is_gone_is_tried_itself() -> None:
    """As after an update of the code, when the module is imported again."""

    def step_of(across: bool) -> Any:
        @torch.no_grad()
        def step(self: Any, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad.mean() if across else parameter.grad, alpha=self.param_groups[0]["lr"])

        return step

    for _ in range(50):
        first = type("Own", (SGD,), {"step": step_of(False)})
        number = id(first)
        assert why_not_elementwise(first([nn.Parameter(torch.ones(6))], lr=0.1)) == ""
        del first
        gc.collect()
        second = type("Own", (SGD,), {"step": step_of(True)})
        assert "mean" in why_not_elementwise(second([nn.Parameter(torch.ones(6))], lr=0.1))
        if id(second) == number:
            return
    pytest.fail("no id was given twice")


@pytest.mark.parametrize("revived", [False, True])
def test_a_number_of_an_optimizer_beside_its_state_goes_on_after_a_restore(
    make_job: Any, reference: Any, revived: bool
) -> None:
    """The rate is divided by a counter, which the step that makes the state of a new optimizer would have moved."""
    spec = {**SPEC, "task": "own_optimizers:Own", "model": {"optimizer": "Counted"}, "checkpoint": {"every_steps": 3}}
    job = make_job(**spec)
    (worker,) = job.workers(1)
    worker.strike("forward", 5, "hold")
    generation = job.start([worker])
    worker.reached()
    job.wait_until_committed([worker], 3)
    worker.call("interrupt", generation)
    worker.call("go")
    worker.exit()
    (other,) = [worker] if revived else job.workers(1)
    (end,) = job.run([other])
    assert end.kind is ExitKind.FINISHED, end
    assert job.losses([worker, other]) == pytest.approx(reference(STEPS, **spec), rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_may_give_a_parameter_new_memory(make_job: Any, reference: Any, world_size: int) -> None:
    spec = {**SPEC, "task": "own_optimizers:Own", "model": {"optimizer": "Assigning"}}
    job = make_job(memory=True, **spec)
    workers = job.workers(world_size)
    job.finish(workers, layout=plain(world_size))
    assert job.losses(workers) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_a_tensor_of_an_optimizer_that_its_step_changes_is_refused(make_job: Any) -> None:
    job = make_job(**SPEC, task="own_optimizers:Own", model={"optimizer": "Remembering"})
    (end,) = job.run(job.workers(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "changes 'norm', which no checkpoint holds" in end.error.message
