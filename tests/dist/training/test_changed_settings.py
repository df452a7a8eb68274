"""Whatever has changed in the optimizer's settings since the checkpoint acts, against a plain loop in torch that takes
the state over into an optimizer of the new settings; what the run itself has changed is restored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_reference
from shoal_workers.contract.messages import ExitKind

SWITCH, STEPS = 3, 6
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 4},
    "optimizer": {"lr": 0.05, "clip_norm": None},
    "schedule": {"name": "constant", "warmup_steps": 0},
    "checkpoint": {"every_steps": SWITCH},
    "validation": {"samples": 0},
    "data": {"late": list(range(STEPS))},
    "seed": 3,
}
ADAMW = {"kind": "AdamW", "options": {"weight_decay": 0.1}}
SGD = {"kind": "SGD", "options": {"momentum": 0.9, "weight_decay": 0.1}}


def _spec(task: str, steps: int, model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    values = {"task": task, "stop": {"steps": steps}, "model": model}
    return {**SPEC, **values, "optimizer": {**SPEC["optimizer"], **optimizer}}


def _train(make_job: Any, root: str, spec: dict[str, Any], **assignment: Any) -> dict[int, float]:
    job = make_job(root, **spec)
    (worker,) = job.workers(1)
    (end,) = job.run([worker], **assignment)
    assert end.kind is ExitKind.FINISHED, end.error
    losses: dict[int, float] = job.losses([worker])
    return losses


def _assert_acts(make_job: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    """The new settings act as they do in plain torch, and not as the old ones would."""
    first = _train(make_job, "job", {**before, "stop": {"steps": SWITCH}})
    losses = first | _train(make_job, "job", after)
    switched = plain_reference.switched_losses(before, after, SWITCH, STEPS)
    assert losses == pytest.approx(switched, abs=1e-5)
    plain = plain_reference.switched_losses(before, before, SWITCH, STEPS)
    assert abs(losses[STEPS] - plain[STEPS]) > 1e-4


@pytest.mark.parametrize(
    "changed", [{"weight_decay": 3.0}, {"beta1": 0.2}, {"beta2": 0.5}, {"eps": 0.1}, {"lr": 0.2}, {"clip_norm": 0.01}]
)
def test_a_changed_setting_of_the_built_in_optimizer_acts(make_job: Any, changed: dict[str, Any]) -> None:
    task = "late_tasks:Late"
    _assert_acts(make_job, _spec(task, STEPS, {}, {}), _spec(task, STEPS, {}, changed))


@pytest.mark.parametrize(
    ("task", "before", "changed"),
    [
        ("Tuned", ADAMW, {"weight_decay": 3.0, "betas": [0.5, 0.7]}),
        ("Tuned", SGD, {"momentum": 0.5, "nesterov": True}),
        ("Tuned", SGD, {"momentum": 0.0}),
        ("Tuned", {**ADAMW, "groups": True}, {"weight_decay": 3.0}),
        ("TunedElementwise", SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1.0}),
    ],
)
def test_a_changed_setting_of_a_tasks_optimizer_acts(
    make_job: Any, task: str, before: dict[str, Any], changed: dict[str, Any]
) -> None:
    after = {**before, "options": {**before["options"], **changed}}
    task = f"tuned_tasks:{task}"
    _assert_acts(make_job, _spec(task, STEPS, before, {}), _spec(task, STEPS, after, {}))


def test_new_code_that_takes_over_from_memory_has_its_own_settings(make_job: Any) -> None:
    """As after `shoal update --code`: workers with other code read the snapshot of those before."""
    before = _spec("tuned_tasks:Tuned", STEPS, SGD, {})
    after = _spec("tuned_tasks:Tuned", STEPS, {**SGD, "options": {"momentum": 0.5, "nesterov": True}}, {})
    job = make_job("job", memory=True, **before, snapshot={"budget": 1.0})
    (old,) = job.workers(1)
    old.strike("forward", SWITCH, "hold")
    generation = job.start([old], restore_from=None)
    old.reached()
    old.call("interrupt", generation)
    old.call("go")
    source = job.in_memory([old.exit()], [old])
    assert source.step == SWITCH
    job.spec = after
    (new,) = job.workers(1)
    (end,) = job.run([new], restore_snapshot=source, restore_from=None)
    assert end.kind is ExitKind.FINISHED, end.error
    switched = plain_reference.switched_losses(before, after, SWITCH, STEPS)
    assert job.losses([new]) == pytest.approx({s: switched[s] for s in range(SWITCH + 1, STEPS + 1)}, abs=1e-5)


def test_a_setting_that_needs_another_state_is_refused_by_name(make_job: Any) -> None:
    after = {**ADAMW, "options": {"amsgrad": True}}
    _train(make_job, "job", _spec("tuned_tasks:Tuned", SWITCH, ADAMW, {}))
    job = make_job("job", **_spec("tuned_tasks:Tuned", STEPS, after, {}))
    (end,) = job.run(job.workers(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "has no optim.used.0.weight.max_exp_avg_sq" in end.error.message


def test_what_the_run_itself_has_changed_is_restored_unless_it_is_built_otherwise_now(
    make_job: Any, tmp_path: Path
) -> None:
    task = "tuned_tasks:Mutating"
    whole = _train(make_job, "whole", _spec(task, STEPS, ADAMW, {}))
    _train(make_job, "job", _spec(task, SWITCH, ADAMW, {}))
    again = _train(make_job, "job", _spec(task, STEPS, ADAMW, {}))
    assert again == {step: whole[step] for step in again}
    assert min(again) == SWITCH + 1
    after = {**ADAMW, "options": {"weight_decay": 3.0}}
    (directory,) = tmp_path.glob(f"job/step-{SWITCH:012d}-*")
    changed = _train(make_job, "changed", _spec(task, STEPS, after, {}), restore_from=str(directory))
    assert abs(changed[STEPS] - again[STEPS]) > 1e-4


def test_a_plain_resume_is_bit_for_bit_the_undisturbed_run(make_job: Any) -> None:
    spec = _spec("late_tasks:Late", STEPS, {}, {})
    whole = _train(make_job, "whole", spec)
    _train(make_job, "job", {**spec, "stop": {"steps": SWITCH}})
    again = _train(make_job, "job", spec)
    assert again == {step: whole[step] for step in range(SWITCH + 1, STEPS + 1)}
