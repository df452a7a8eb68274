"""The median rule: which step is compared, who is ended, and when nothing is decided."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.sweeps.pruning import AVERAGED_STEPS, Measure, Rule, rank, rule_of, step_to_compare, verdict

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
    found = verdict("me", 75, {"me": 3.2, "a": 2.0, "b": 2.9, "c": 4.0})
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
    assert verdict("me", 75, values) is None


def test_a_loss_that_is_not_a_number_is_worse_than_every_number() -> None:
    assert verdict("me", 75, {"me": math.nan, "a": 9.0, "b": 8.0}) is not None
    assert verdict("me", 75, {"me": 9.0, "a": math.nan, "b": 8.0, "c": math.nan}) is None


@given(st.dictionaries(st.text("abcdef", min_size=1), st.floats(-10, 10), min_size=3, max_size=12))
def test_at_one_step_at_most_half_of_the_jobs_are_ended(values: dict[str, float]) -> None:
    ended = [job for job in values if verdict(job, 1, values) is not None]
    assert 2 * len(ended) <= len(values) and min(values, key=values.__getitem__) not in ended


def test_the_best_job_is_first_and_those_without_a_loss_are_last() -> None:
    values = {"a": (None, None), "b": (None, 2.0), "c": (1.0, 9.0), "d": (math.nan, 0.5), "e": (3.0, 0.1)}
    assert sorted(values, key=lambda name: rank(*values[name])) == ["c", "b", "e", "d", "a"]
