"""The grid of a sweep, and the median rule that ends jobs of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.sweeps import (
    AVERAGED_STEPS,
    InvalidGrid,
    Measure,
    Rule,
    combinations,
    document_of,
    labels_of,
    parse_axis,
    rank,
    rule_of,
    step_to_compare,
    verdict,
)


def test_values_are_separated_by_commas_outside_of_brackets_and_quotes() -> None:
    assert parse_axis("optimizer.lr=1e-4, 3e-4") == ("optimizer.lr", ("1e-4", "3e-4"))
    assert parse_axis("model.sizes=[1,2],[3,{a: 4,5}],'x,y'")[1] == ("[1,2]", "[3,{a: 4,5}]", "'x,y'")


@pytest.mark.parametrize("text", ["optimizer.lr", "=1,2", "lr=", "lr=1,,2", "lr=1,1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidGrid, match="--grid"):
        parse_axis(text)


def test_every_combination_is_one_job() -> None:
    found = combinations([("optimizer.lr", ("1", "2")), ("seed", ("3", "4", "5"))])
    assert len(found) == 6 and found[1] == {"optimizer.lr": "1", "seed": "4"}


def test_a_key_twice_and_too_many_jobs_are_refused() -> None:
    with pytest.raises(InvalidGrid, match="names seed twice"):
        combinations([("seed", ("1",)), ("seed", ("2",))])
    with pytest.raises(InvalidGrid, match="2,500 combinations"):
        combinations([("a", tuple(map(str, range(50)))), ("b", tuple(map(str, range(50))))])


def test_a_label_is_the_last_part_of_a_key_where_that_is_unique() -> None:
    assert labels_of({"optimizer.lr": "3e-4", "seed": "1"}) == {"lr": "3e-4", "seed": "1"}
    assert labels_of({"model.dim": "8", "data.dim": "'9'"}) == {"model.dim": "8", "data.dim": "9"}
    assert labels_of({"data.sweep": "8"}) == {"data.sweep": "8"}


def test_a_document_has_the_values_at_their_paths_and_the_shared_one_stays() -> None:
    shared = {"optimizer": {"lr": 1, "name": "adam"}}
    found = document_of(shared, {"optimizer.lr": 2, "model.layers": [3]})
    assert found == {"optimizer": {"lr": 2, "name": "adam"}, "model": {"layers": [3]}}
    assert shared == {"optimizer": {"lr": 1, "name": "adam"}}


@pytest.mark.parametrize("path", ["a..b", "", "name", "sweep.limit", "project", "optimizer.lr.x"])
def test_a_path_that_cannot_be_varied_is_refused(path: str) -> None:
    with pytest.raises(InvalidGrid, match="grid: "):
        document_of({"optimizer": {"lr": 1}}, {path: 1})


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
