"""Which jobs of a sweep are ended: the median rule, and successive halving."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.pruning import (
    AVERAGED_STEPS,
    Measure,
    Method,
    Rule,
    rule_of,
    step_to_compare,
    verdict,
)

RULE = Rule(Measure.VALIDATION, every_steps=25, warmup_steps=50)


def test_validation_is_compared_where_there_is_one_and_otherwise_the_training_loss() -> None:
    assert rule_of(25, 50) == RULE
    assert rule_of(None, 50) == Rule(Measure.TRAINING, AVERAGED_STEPS, 50)


@pytest.mark.parametrize(
    ("reached", "step"),
    [
        ({"me": 100, "a": 100, "b": 75}, 75),  # the last step that two others have reached
        ({"me": 60, "a": 200, "b": 200}, 50),  # ... and that is a validation of the job
        ({"me": 300, "a": 200, "b": 25}, None),  # only one other is past the warm-up
        ({"me": 49, "a": 200, "b": 200}, None),
        ({"me": 100, "a": 100}, None),  # a duel
        ({"a": 100, "b": 100}, None),  # it has no value yet
        ({"me": 100, "a": 100, "b": 100, "c": 0}, 100),
    ],
)
def test_the_step_is_the_last_one_that_two_others_have_reached(reached: dict[str, int], step: int | None) -> None:
    assert step_to_compare("me", reached, RULE) == step


def test_a_job_worse_than_the_median_of_the_others_is_ended_with_the_numbers() -> None:
    found = verdict("me", 75, {"me": 3.2, "a": 2.0, "b": 2.9, "c": 4.0}, RULE)
    assert found is not None
    assert (found.step, found.value, found.median, found.num_others) == (75, 3.2, 2.9, 3)


@pytest.mark.parametrize(
    "values",
    [
        {"me": 2.9, "a": 2.0, "b": 2.9, "c": 4.0},  # as good as the median
        {"me": 3.0, "a": 1.0},  # a duel
        {"a": 1.0, "b": 1.0},
        {"me": math.nan, "a": math.nan, "b": math.nan},  # no better than the others, but no worse
    ],
)
def test_otherwise_it_goes_on(values: dict[str, float]) -> None:
    assert verdict("me", 75, values, RULE) is None


def test_a_loss_that_is_not_a_number_is_worse_than_every_number() -> None:
    assert verdict("me", 75, {"me": math.nan, "a": 9.0, "b": 8.0}, RULE) is not None
    assert verdict("me", 75, {"me": 9.0, "a": math.nan, "b": 8.0, "c": math.nan}, RULE) is None


@given(st.dictionaries(st.text("abcdef", min_size=1), st.floats(-10, 10), min_size=3, max_size=12))
def test_at_one_step_at_most_half_of_the_jobs_are_ended(values: dict[str, float]) -> None:
    ended = [job for job in values if verdict(job, 1, values, RULE) is not None]
    assert 2 * len(ended) <= len(values) and min(values, key=values.__getitem__) not in ended


HALVING = Rule(Measure.VALIDATION, every_steps=25, warmup_steps=50, method=Method.HALVING, reduction=3)


@pytest.mark.parametrize(
    ("reached", "rung"), [(49, None), (50, 50), (149, 50), (150, 150), (449, 150), (450, 450), (10_000, 4_050)]
)
def test_the_rungs_are_the_warm_up_times_powers_of_the_reduction(reached: int, rung: int | None) -> None:
    assert step_to_compare("me", {"me": reached}, HALVING) == rung


def test_a_rung_is_a_step_at_which_there_is_a_value() -> None:
    rule = rule_of(None, 20, Method.HALVING, 2)
    rungs = {step_to_compare("me", {"me": reached}, rule) for reached in range(8, 200, 8)}
    assert rungs == {None, 24, 40, 80, 160}


def test_a_job_that_does_not_pass_a_rung_is_ended_with_the_numbers() -> None:
    values = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    found = verdict("c", 50, values, HALVING)
    assert found is not None
    assert (found.step, found.value, found.median, found.num_others, found.num_kept) == (50, 3.0, 2.0, 3, 2)
    assert [job for job in values if verdict(job, 50, values, HALVING)] == ["c", "d"]


def test_below_the_reduction_no_job_is_ended() -> None:
    assert verdict("b", 50, {"a": 1.0, "b": 2.0}, HALVING) is None
    assert verdict("b", 50, {"a": 1.0, "c": 2.0, "d": 3.0}, HALVING) is None, "it has no value at this step"


@given(st.dictionaries(st.text("abcdef", min_size=1), st.floats(-10, 10), min_size=2, max_size=12), st.integers(2, 5))
def test_of_different_values_just_the_share_passes_a_rung(values: dict[str, float], reduction: int) -> None:
    different = {job: value + place * 1e3 for place, (job, value) in enumerate(values.items())}
    rule = Rule(Measure.TRAINING, 8, 8, Method.HALVING, reduction)
    passed = [job for job in different if verdict(job, 8, different, rule) is None]
    assert len(passed) == (-(-len(different) // reduction) if len(different) >= reduction else len(different))
    assert min(different, key=different.__getitem__) in passed


def test_in_any_order_of_arrival_the_best_job_of_a_sweep_reaches_the_end() -> None:
    losses = {f"job-{number}": float(number) for number in range(9)}
    rungs = (50, 150, 450)
    for first in range(9):
        order = [*list(losses)[first:], *list(losses)[:first]]
        reached: dict[str, int] = {}
        ended: set[str] = set()
        for rung in rungs:
            for job in (one for one in order if one not in ended):
                reached[job] = rung
                for other in [one for one in reached if one not in ended]:
                    at = step_to_compare(other, reached, HALVING)
                    assert at is not None
                    there = {one: losses[one] for one, step in reached.items() if step >= at}
                    if verdict(other, at, there, HALVING):
                        ended.add(other)
        assert "job-0" not in ended and len(ended) >= 6, (first, ended)
