"""How long a run is, and the rate of each of its steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.spec import ScheduleSpec, StopSpec
from shoal_workers.engine.schedule import is_due, lr_factor, total_steps


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
    assert total_steps(spec, global_size=10, num_samples=25, tokens_per_sample=8) == steps


def test_a_tenth_of_thirty_samples_is_three_samples() -> None:
    assert total_steps(StopSpec(epochs=0.1), global_size=3, num_samples=30, tokens_per_sample=1) == 1


def test_a_thing_is_due_after_every_so_many_steps_or_never() -> None:
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert not is_due(3, None)


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
    assert [lr_factor(schedule, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "one_cycle", "polynomial"])
def test_the_decay_ends_at_the_minimum_in_the_last_update(name: str) -> None:
    schedule = ScheduleSpec.model_validate({"name": name, "warmup_steps": 3, "min_lr_ratio": 0.1})
    assert lr_factor(schedule, 19, 20) == pytest.approx(0.1)
    assert lr_factor(schedule, 25, 20) == pytest.approx(0.1)


def test_cosine_and_linear_are_equal_half_way() -> None:
    for name in ("cosine", "linear"):
        schedule = ScheduleSpec.model_validate({"name": name, "warmup_steps": 0, "min_lr_ratio": 0.0})
        assert lr_factor(schedule, 9, 20) == pytest.approx(0.5)


def test_constant_stays_at_the_peak() -> None:
    assert {lr_factor(ScheduleSpec(name="constant", warmup_steps=2), step, 10) for step in range(2, 10)} == {1.0}


@given(SCHEDULES, st.integers(1, 60))
def test_the_factor_is_positive_bounded_and_never_rises_after_warm_up(schedule: ScheduleSpec, total: int) -> None:
    factors = [lr_factor(schedule, step, total) for step in range(total)]
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
    return [lr_factor(schedule, step, num) for step in range(num)]


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
    ],
)
def test_a_key_of_another_schedule_is_refused_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScheduleSpec(**settings)
