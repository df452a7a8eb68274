"""How long a run is, and the rate of each of its steps."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.schedules import ARGUMENTS, ScheduleSpec
from shoal_workers.contract.spec import StopSpec
from shoal_workers.engine.schedule import compute_lr_factor, count_total_steps, is_due


@pytest.mark.parametrize(
    ("stop", "steps"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 1}, 1),
        ({"tokens": 80}, 1),
        ({"tokens": 81}, 2),
        ({"tokens": 80 * 10**13 + 1}, 10**13 + 1),
        ({"epochs": 1}, 3),
        ({"epochs": 0.8}, 2),
        ({"epochs": 0.4}, 1),
        ({"epochs": 2}, 5),
        ({"epochs": 1e-9}, 1),
    ],
)
def test_tokens_and_epochs_are_rounded_up_to_whole_steps(stop: dict[str, float], steps: int) -> None:
    spec = StopSpec.model_validate(stop)
    assert count_total_steps(spec, global_size=10, num_samples=25, tokens_per_sample=8) == steps


def test_a_tenth_of_thirty_samples_is_three_samples() -> None:
    assert count_total_steps(StopSpec(epochs=0.1), global_size=3, num_samples=30, tokens_per_sample=1) == 1


def test_a_thing_is_due_after_every_so_many_steps_or_never() -> None:
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert not is_due(3, None)


TORCH = "torch.optim.lr_scheduler"
_SHAPES: list[dict[str, Any]] = [
    *({"name": name} for name in ("cosine", "linear", "constant", "wsd", "inverse_sqrt", "one_cycle", "polynomial")),
    {"name": "wsd", "decay_steps": 7},
    {"name": "polynomial", "power": 0.5},
    {"name": "step", "every_steps": 4, "factor": 0.5},
]
SCHEDULES = st.builds(
    lambda shape, **settings: ScheduleSpec(**shape, **settings),
    shape=st.sampled_from(_SHAPES),
    warmup_steps=st.integers(0, 30),
    min_lr_ratio=st.floats(0, 1),
)


def test_warm_up_is_linear_and_reaches_the_peak_in_its_last_update() -> None:
    schedule = ScheduleSpec(warmup_steps=4)
    assert [compute_lr_factor(schedule, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "one_cycle", "polynomial"])
def test_the_decay_ends_at_the_minimum_in_the_last_update(name: str) -> None:
    schedule = ScheduleSpec.model_validate({"name": name, "warmup_steps": 3, "min_lr_ratio": 0.1})
    assert compute_lr_factor(schedule, 19, 20) == pytest.approx(0.1)
    assert compute_lr_factor(schedule, 25, 20) == pytest.approx(0.1)


def test_cosine_and_linear_are_equal_half_way() -> None:
    for name in ("cosine", "linear"):
        schedule = ScheduleSpec.model_validate({"name": name, "warmup_steps": 0, "min_lr_ratio": 0.0})
        assert compute_lr_factor(schedule, 9, 20) == pytest.approx(0.5)


def test_constant_stays_at_the_peak() -> None:
    assert all(compute_lr_factor(ScheduleSpec(name="constant", warmup_steps=2), step, 10) == 1 for step in range(2, 10))


@given(SCHEDULES, st.integers(1, 60))
def test_the_factor_is_positive_bounded_and_never_rises_after_warm_up(schedule: ScheduleSpec, total: int) -> None:
    factors = [compute_lr_factor(schedule, step, total) for step in range(total)]
    assert all(0 <= factor <= 1 for factor in factors)
    decay = factors[schedule.warmup_steps :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(decay))


def _torch_factors(kind: type[torch.optim.lr_scheduler.LRScheduler], num: int, **settings: Any) -> list[float]:
    """The rates of torch's own scheduler over a peak of 1, update by update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = kind(optimizer, **settings)
    factors = []
    for _ in range(num):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def _factors(num: int, **settings: Any) -> list[float]:
    schedule = ScheduleSpec(**settings)
    return [compute_lr_factor(schedule, step, num) for step in range(num)]


def test_one_cycle_and_step_are_those_of_torch() -> None:
    settings = {"max_lr": 1.0, "total_steps": 20, "pct_start": 0.3, "cycle_momentum": False, "final_div_factor": 0.4}
    one_cycle = _torch_factors(torch.optim.lr_scheduler.OneCycleLR, 20, **settings)
    assert _factors(20, name="one_cycle", warmup_steps=6, min_lr_ratio=0.1) == pytest.approx(one_cycle)
    step = _torch_factors(torch.optim.lr_scheduler.StepLR, 20, step_size=6, gamma=0.5)
    assert _factors(20, name="step", warmup_steps=0, min_lr_ratio=0.0, every_steps=6, factor=0.5) == step


def test_polynomial_is_that_of_torch_one_update_later() -> None:
    """Shoal's decays reach the minimum in the last update, torch's after it."""
    settings: dict[str, Any] = {"total_iters": 20, "power": 3.0}
    polynomial = _torch_factors(torch.optim.lr_scheduler.PolynomialLR, 21, **settings)
    ours = _factors(20, name="polynomial", warmup_steps=0, min_lr_ratio=0.0, power=3.0)
    assert ours == pytest.approx(polynomial[1:])


def test_wsd_stays_at_the_peak_and_falls_in_the_last_fifth() -> None:
    factors = _factors(20, name="wsd", warmup_steps=2, min_lr_ratio=0.0)
    assert factors == pytest.approx([0.5] + [1.0] * 15 + [0.75, 0.5, 0.25, 0.0])
    longer = _factors(20, name="wsd", warmup_steps=2, min_lr_ratio=0.0, decay_steps=10)
    assert longer[9:] == pytest.approx([1.0 - n / 10 for n in range(11)])


def test_inverse_sqrt_falls_with_the_root_of_the_steps_to_the_minimum() -> None:
    factors = _factors(500, name="inverse_sqrt", warmup_steps=4, min_lr_ratio=0.1)
    assert (factors[3], factors[15], factors[99]) == pytest.approx((1.0, 0.5, 0.2))
    assert factors[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "step"}, "schedule.name is step, which needs schedule.every_steps"),
        ({"power": 2.0}, "schedule.power belongs to schedule.name: polynomial, and schedule.name is cosine"),
        ({"name": "step", "every_steps": 3, "decay_steps": 3}, "schedule.decay_steps belongs to schedule.name: wsd"),
        ({"args": {"T_0": 3}}, "schedule.args belongs to a scheduler by its path, and schedule.name is cosine"),
        ({"name": "cosin"}, r"'cosin' is not known. Did you mean cosine\? Use one of cosine, linear"),
        ({"name": f"{TORCH}.StepLr"}, r"Did you mean torch.optim.lr_scheduler.StepLR\?"),
        ({"name": f"{TORCH}.LambdaLR"}, "cannot be used: its argument is a function"),
        ({"name": f"{TORCH}.StepLR"}, "schedule.args.step_size is required by torch.optim.lr_scheduler.StepLR"),
        ({"name": f"{TORCH}.StepLR", "args": {"step": 3}}, r"Did you mean step_size\? It has step_size, gamma."),
        ({"name": f"{TORCH}.ExponentialLR", "args": {"gamma": 0.9}, "steps": 3}, "schedule.steps does not belong to a"),
    ],
)
def test_a_key_of_another_schedule_is_refused_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScheduleSpec(**settings)


_LAST = {"optimizer", "last_epoch"}
_NOT_OFFERED = {
    "CyclicLR": {"scale_fn", "cycle_momentum", "base_momentum", "max_momentum"},
    "OneCycleLR": {"epochs", "steps_per_epoch", "cycle_momentum", "base_momentum", "max_momentum"},
}
"""Functions, momenta, and what is said in another way."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_table_has_the_arguments_of_torch(name: str) -> None:
    signature = inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters
    required, others = ARGUMENTS[name]
    assert {*required, *others} == signature.keys() - _LAST - _NOT_OFFERED.get(name, set())
    without = {key for key, one in signature.items() if one.default is inspect.Parameter.empty} - _LAST
    assert without <= set(required)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ConstantLR", {"factor": 0.5}),
        ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.1}),
        ("CosineAnnealingWarmRestarts", {"T_0": 5, "T_mult": 2}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 4}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("LinearLR", {"start_factor": 0.2}),
        ("MultiStepLR", {"milestones": [3, 9]}),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 30}),
        ("PolynomialLR", {"total_iters": 12, "power": 2.0}),
        ("StepLR", {"step_size": 4}),
    ],
)
def test_a_scheduler_of_torch_gives_its_rates_in_any_order_after_the_warm_up(name: str, args: dict[str, Any]) -> None:
    schedule = ScheduleSpec.model_validate({"name": f"{TORCH}.{name}", "args": args})
    kind = getattr(torch.optim.lr_scheduler, name)
    momentum = {"cycle_momentum": False} if name in ("CyclicLR", "OneCycleLR") else {}
    expected = _torch_factors(kind, 30, **args, **momentum)
    assert [compute_lr_factor(schedule, step, 5) for step in (29, 3, 17)] == [expected[step] for step in (29, 3, 17)]
    assert [compute_lr_factor(schedule, step, 5) for step in range(30)] == expected
    warm = schedule.model_copy(update={"warmup_steps": 2})
    assert [compute_lr_factor(warm, step, 5) for step in range(4)] == [0.5, 1.0, *expected[:2]]


class Halved(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler as users write them."""

    def __init__(self, optimizer: torch.optim.Optimizer, least: float) -> None:
        self.least = least
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [max(self.least, base / 2**self.last_epoch) for base in self.base_lrs]


def test_a_scheduler_of_a_user_gets_its_arguments_and_its_mistakes_are_named() -> None:
    path = f"{__name__}:Halved"
    schedule = ScheduleSpec.model_validate({"name": path, "args": {"least": 0.2}})
    assert [compute_lr_factor(schedule, step, 9) for step in range(4)] == [1.0, 0.5, 0.25, 0.2]
    for name, args, words in (
        (path, {}, "refuses them: .*least"),
        ("no_such_module.Halved", {}, "cannot be imported here"),
        (f"{__name__}:ScheduleSpec", {}, "is not a torch.optim.lr_scheduler.LRScheduler"),
        (path, {"least": float("inf")}, "its rate is inf times optimizer.lr"),
    ):
        schedule = ScheduleSpec.model_validate({"name": name, "args": args})
        with pytest.raises(ValueError, match=words):
            compute_lr_factor(schedule, 0, 9)


def test_the_document_of_a_path_has_no_keys_of_names_and_can_be_submitted_again() -> None:
    by_path = ScheduleSpec.model_validate({"name": f"{TORCH}.ExponentialLR", "args": {"gamma": 0.9}})
    document = by_path.model_dump(mode="json")
    assert document == {"name": f"{TORCH}.ExponentialLR", "warmup_steps": 0, "args": {"gamma": 0.9}}
    assert ScheduleSpec.model_validate(document) == by_path
    by_name = ScheduleSpec().model_dump(mode="json")
    assert by_name.keys() == ScheduleSpec.model_fields.keys() - {"args"} and by_name["warmup_steps"] == 10
