"""The loss scale halves after one bad step, doubles after several good ones, and stays within its bounds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.step.loss_scale import LossScale, ScalePolicy, Scaling, after_step

POLICY = ScalePolicy(initial=16.0, growth_interval=3, smallest=1.0, largest=64.0)


def run(outcomes: list[bool], state: LossScale | None = None) -> list[float]:
    """The scale after each step."""
    state = state or LossScale(POLICY.initial)
    scales = []
    for is_finite in outcomes:
        state = after_step(state, is_finite=is_finite, policy=POLICY)
        scales.append(state.scale)
    return scales


def test_a_step_that_is_not_finite_halves_the_scale() -> None:
    assert after_step(LossScale(16.0, 2), is_finite=False, policy=POLICY) == LossScale(8.0, 0)


def test_finite_steps_in_a_row_double_the_scale() -> None:
    assert run([True] * 7) == [16, 16, 32, 32, 32, 64, 64]


def test_an_overflow_restarts_the_count_of_finite_steps() -> None:
    assert run([True, True, False, True, True, True]) == [16, 16, 8, 8, 8, 16]


def test_the_scale_never_exceeds_its_maximum() -> None:
    assert run([True] * 30)[-1] == POLICY.largest


def test_a_non_finite_step_at_the_smallest_scale_did_not_overflow() -> None:
    scaling = Scaling(_spec(precision="fp16"), ScalePolicy(initial=2.0, growth_interval=1))
    assert [scaling.update(is_finite=is_finite) for is_finite in (False, False, True, False)] == [
        True,
        False,
        False,
        True,
    ]
    assert scaling.scale == 1.0


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_is_a_power_of_two_within_its_bounds(outcomes: list[bool]) -> None:
    scales = run(outcomes)
    assert {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0} >= set(scales)


@given(st.lists(st.booleans(), max_size=60))
def test_a_step_updates_if_it_is_finite_whatever_becomes_of_the_scale(outcomes: list[bool]) -> None:
    scaling = Scaling(_spec(precision="fp16"), POLICY)
    for is_finite in outcomes:
        may_overflow = scaling.scale > POLICY.smallest
        assert scaling.update(is_finite=is_finite) is (may_overflow and not is_finite)


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_a_state_restored_from_json_continues_unchanged(outcomes: list[bool], cut: int) -> None:
    first, second = Scaling(_spec(precision="fp16"), POLICY), Scaling(_spec(precision="fp16"), POLICY)
    for is_finite in outcomes[:cut]:
        first.update(is_finite=is_finite)
    second.restore(json.loads(json.dumps(first.to_json())))
    for is_finite in outcomes[cut:]:
        assert first.update(is_finite=is_finite) == second.update(is_finite=is_finite)
    assert first.to_json() == second.to_json() and first.scale == second.scale


def _spec(**settings: str) -> JobSpec:
    return JobSpec.model_validate({"stop": {"steps": 1}, **settings})


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"reduce_precision": "bf16"}])
def test_without_fp16_there_is_no_scale(settings: dict[str, str]) -> None:
    scaling = Scaling(_spec(**settings))
    scaling.restore({"scale": 8.0, "num_finite": 1})
    assert scaling.scale == 1.0
    assert not scaling.update(is_finite=False)
    assert scaling.to_json() is None


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"reduce_precision": "fp16"}])
def test_fp16_in_either_place_has_a_scale(settings: dict[str, str]) -> None:
    scaling = Scaling(_spec(**settings))
    scaling.restore(None)
    assert scaling.scale == ScalePolicy().initial
    assert scaling.update(is_finite=False)
    assert scaling.scale == ScalePolicy().initial / 2


def test_a_restored_scaling_continues_from_the_saved_state() -> None:
    first = Scaling(_spec(precision="fp16"), ScalePolicy(growth_interval=2))
    first.update(is_finite=False)
    first.update(is_finite=True)
    second = Scaling(_spec(precision="fp16"), ScalePolicy(growth_interval=2))
    second.restore(first.to_json())
    for scaling in (first, second):
        scaling.update(is_finite=True)
    assert first.to_json() == second.to_json() == {"scale": ScalePolicy().initial, "num_finite": 0, "weight": None}


def test_losses_that_are_sums_divide_the_scale_once_by_a_power_of_two_near_their_mean_weight() -> None:
    scaling = Scaling(_spec(precision="fp16"))
    assert not scaling.learn(0.0)  # nothing counts in the first step
    assert scaling.learn(700.0)
    assert scaling.scale == ScalePolicy().initial / 512
    assert not scaling.learn(90_000.0)
    scaling.update(is_finite=False)
    restored = Scaling(_spec(precision="fp16"))
    restored.restore(scaling.to_json())
    assert scaling.scale == restored.scale == ScalePolicy().initial / 1024
    assert not restored.learn(3.0)


def test_means_leave_the_scale_alone() -> None:
    scaling = Scaling(_spec(precision="fp16"))
    assert not scaling.learn(1.0)
    assert scaling.scale == ScalePolicy().initial
    assert not Scaling(_spec()).learn(700.0)
