"""How long a run is, and the rate of each of its steps."""

from __future__ import annotations

import itertools

import pytest
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


SCHEDULES = st.builds(
    ScheduleSpec,
    name=st.sampled_from(["cosine", "linear", "constant"]),
    warmup_steps=st.integers(0, 30),
    min_lr_ratio=st.floats(0, 1),
)


def test_warm_up_is_linear_and_reaches_the_peak_in_its_last_update() -> None:
    schedule = ScheduleSpec(warmup_steps=4)
    assert [lr_factor(schedule, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear"])
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
