from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.spec import ScheduleSpec
from shoal_workers.engine.schedule import lr_factor

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
