"""The loss scale halves at once, doubles with patience, stays within its bounds, and comes back from JSON as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.step.loss_scale import LossScale, ScalePolicy, after_step

POLICY = ScalePolicy(initial=16.0, growth_interval=3, smallest=1.0, largest=64.0)


def run(outcomes: list[bool], state: LossScale | None = None) -> list[float]:
    """The scale after each step."""
    state = state or LossScale.first(POLICY)
    scales = []
    for is_finite in outcomes:
        state = after_step(state, is_finite=is_finite, policy=POLICY).state
        scales.append(state.scale)
    return scales


def test_a_step_that_is_not_finite_halves_the_scale_and_updates_nothing() -> None:
    verdict = after_step(LossScale(16.0, 2), is_finite=False, policy=POLICY)
    assert verdict.state == LossScale(8.0, 0)
    assert not verdict.updates and not verdict.is_hopeless
    assert verdict.reason == "not finite: loss scale 16 -> 8"


def test_finite_steps_in_a_row_double_the_scale() -> None:
    assert run([True] * 7) == [16, 16, 32, 32, 32, 64, 64]


def test_an_overflow_starts_the_count_again() -> None:
    assert run([True, True, False, True, True, True]) == [16, 16, 8, 8, 8, 16]


def test_the_scale_stays_at_its_largest() -> None:
    assert run([True] * 30)[-1] == POLICY.largest


def test_at_the_smallest_scale_the_range_of_fp16_is_not_to_blame() -> None:
    verdict = after_step(LossScale(1.0, 1), is_finite=False, policy=POLICY)
    assert verdict.is_hopeless and not verdict.updates
    assert verdict.state == LossScale(1.0, 0)


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_is_a_power_of_two_within_its_bounds(outcomes: list[bool]) -> None:
    scales = run(outcomes)
    assert {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0} >= set(scales)


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_a_state_that_went_through_json_goes_on_as_if_nothing_had_happened(outcomes: list[bool], cut: int) -> None:
    state = LossScale.first(POLICY)
    for is_finite in outcomes[:cut]:
        state = after_step(state, is_finite=is_finite, policy=POLICY).state
    again = LossScale.from_json(json.loads(json.dumps(state.to_json())))
    assert again == state
    assert run(outcomes[cut:], again) == run(outcomes)[cut:]


@pytest.mark.parametrize("wrong", [{"smallest": 0.0}, {"initial": 2.0**30}, {"growth_interval": 0}])
def test_bounds_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"loss scale needs|at least 1 step"):
        ScalePolicy(**wrong)  # type: ignore[arg-type]
