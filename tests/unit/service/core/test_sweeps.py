"""Sweeps: the values of their jobs, which of them are ended, and the best so far."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.sweeps import (
    AVERAGED_STEPS,
    Interval,
    InvalidGrid,
    Measure,
    Method,
    Rule,
    best_so_far,
    combine,
    draw,
    make_document,
    make_labels,
    make_rule,
    parse_axis,
    parse_interval,
    rank,
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
    choices = combine([("optimizer.lr", ("1", "2")), ("seed", ("3", "4", "5"))])
    assert len(choices) == 6 and choices[1] == {"optimizer.lr": "1", "seed": "4"}


def test_a_key_twice_and_too_many_jobs_are_refused() -> None:
    with pytest.raises(InvalidGrid, match="names seed twice"):
        combine([("seed", ("1",)), ("seed", ("2",))])
    with pytest.raises(InvalidGrid, match="2,500 combinations"):
        combine([("a", tuple(map(str, range(50)))), ("b", tuple(map(str, range(50))))])


def test_a_label_is_the_last_part_of_a_key_where_that_is_unique() -> None:
    assert make_labels({"optimizer.lr": "3e-4", "seed": "1"}) == {"lr": "3e-4", "seed": "1"}
    assert make_labels({"model.dim": "8", "data.dim": "'9'"}) == {"model.dim": "8", "data.dim": "9"}
    assert make_labels({"data.sweep": "8"}) == {"data.sweep": "8"}


def test_a_document_has_the_values_at_their_paths_and_the_shared_one_stays() -> None:
    shared = {"optimizer": {"lr": 1, "name": "adam"}}
    document = make_document(shared, {"optimizer.lr": 2, "model.layers": [3]})
    assert document == {"optimizer": {"lr": 2, "name": "adam"}, "model": {"layers": [3]}}
    assert shared == {"optimizer": {"lr": 1, "name": "adam"}}


@pytest.mark.parametrize("path", ["a..b", "", "name", "sweep.limit", "project", "optimizer.lr.x"])
def test_a_path_that_cannot_be_varied_is_refused(path: str) -> None:
    with pytest.raises(InvalidGrid, match="grid: "):
        make_document({"optimizer": {"lr": 1}}, {path: 1})


LISTS = {"optimizer.name": ("adam", "sgd")}
INTERVALS = {"optimizer.lr": Interval(1e-5, 1e-1, is_log=True), "model.layers": Interval(2, 5, is_whole=True)}


def test_a_draw_depends_on_its_number_and_not_on_how_many_there_are() -> None:
    few, many = (draw(LISTS, INTERVALS, samples=number, seed=7) for number in (5, 50))
    assert many[:5] == few and draw(LISTS, INTERVALS, samples=5, seed=8) != few
    assert {choice["optimizer.name"] for choice in many} == {"adam", "sgd"}
    assert {choice["model.layers"] for choice in many} == {"2", "3", "4", "5"}


def test_a_logarithmic_range_has_as_many_values_in_each_order_of_magnitude() -> None:
    rates = [
        float(choice["optimizer.lr"])
        for choice in draw({}, {"optimizer.lr": INTERVALS["optimizer.lr"]}, samples=400, seed=0)
    ]
    below = [sum(rate < bound for rate in rates) for bound in (1e-4, 1e-3, 1e-2)]
    assert all(abs(number - 100 * place) < 50 for place, number in enumerate(below, 1)) and min(rates) >= 1e-5


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.booleans(), st.integers(0, 2**53))
def test_each_drawn_number_is_within_its_range(low: float, width: float, is_whole: bool, seed: int) -> None:
    low, high = (float(round(low)), float(round(low) + round(width) + 1)) if is_whole else (low, low + width)
    [choice] = draw({}, {"a": Interval(low, high, is_whole=is_whole)}, samples=1, seed=seed)
    spread = 0 if is_whole else 1e-3 * max(abs(low), abs(high))  # four significant digits
    assert low - spread <= float(choice["a"]) <= high + spread


def test_no_set_of_values_is_drawn_twice_and_too_many_are_refused() -> None:
    lists = {"seed": ("1", "2"), "name": ("a", "b")}
    assert len({tuple(choice.items()) for choice in draw(lists, {}, samples=4, seed=1)}) == 4
    with pytest.raises(InvalidGrid, match="samples is 5, and 500 draws gave only 4 different"):
        draw(lists, {}, samples=5, seed=1)


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (Interval(2, 1), "low must be a number less than high"),
        (Interval(0, math.inf), "low must be"),
        (Interval(0, 1, is_log=True), "needs low > 0"),
        (Interval(0.5, 2, is_whole=True), "must be whole"),
    ],
)
def test_a_range_without_values_is_refused(interval: Interval, words: str) -> None:
    with pytest.raises(InvalidGrid, match=f"ranges.lr: .*{words}"):
        draw({}, {"lr": interval}, samples=1, seed=0)


def test_a_key_with_a_list_and_a_range_is_refused() -> None:
    with pytest.raises(InvalidGrid, match="Leave one of the two out"):
        draw({"lr": ("1", "2")}, {"lr": Interval(1, 2)}, samples=1, seed=0)


def test_a_range_is_read_from_the_command_line() -> None:
    assert parse_interval("optimizer.lr=1e-5:1e-2:log") == ("optimizer.lr", Interval(1e-5, 1e-2, is_log=True))
    assert parse_interval("model.layers=2:8") == ("model.layers", Interval(2, 8, is_whole=True))
    for text in ("lr", "lr=1", "lr=a:b", "=1:2", "lr=1:2:exp", "lr=1:2:3:4"):
        with pytest.raises(InvalidGrid, match=r"use KEY\.PATH=LOW:HIGH"):
            parse_interval(text)


def test_the_best_job_is_first_and_those_without_a_loss_are_last() -> None:
    values = {"a": (None, None), "b": (None, 2.0), "c": (1.0, 9.0), "d": (math.nan, 0.5), "e": (3.0, 0.1)}
    assert sorted(values, key=lambda name: rank(*values[name])) == ["c", "b", "e", "d", "a"]


def test_the_best_so_far_is_what_is_lower_than_everything_before() -> None:
    points = [(3.0, 1.0, "c"), (1.0, 5.0, "a"), (2.0, 6.0, "b"), (4.0, 1.0, "d"), (0.0, math.nan, "e")]
    assert best_so_far(points) == [(1.0, 5.0, "a"), (3.0, 1.0, "c")]


RULE = Rule(Measure.VALIDATION, every_steps=25, warmup_steps=50)


def test_validation_is_compared_where_there_is_one_and_otherwise_the_training_loss() -> None:
    assert make_rule(25, 50) == RULE
    assert make_rule(None, 50) == Rule(Measure.TRAINING, AVERAGED_STEPS, 50)


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
    decision = verdict("me", 75, {"me": 3.2, "a": 2.0, "b": 2.9, "c": 4.0}, RULE)
    assert decision is not None
    assert (decision.step, decision.value, decision.median, decision.num_others) == (75, 3.2, 2.9, 3)


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
    rule = make_rule(None, 20, Method.HALVING, 2)
    rungs = {step_to_compare("me", {"me": reached}, rule) for reached in range(8, 200, 8)}
    assert rungs == {None, 24, 40, 80, 160}


def test_a_job_that_does_not_pass_a_rung_is_ended_with_the_numbers() -> None:
    values = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    decision = verdict("c", 50, values, HALVING)
    assert decision is not None
    assert (decision.step, decision.value, decision.median, decision.num_others, decision.num_kept) == (
        50,
        3.0,
        2.0,
        3,
        2,
    )
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
            for job in (name for name in order if name not in ended):
                reached[job] = rung
                for other in [name for name in reached if name not in ended]:
                    at = step_to_compare(other, reached, HALVING)
                    assert at is not None
                    there = {name: losses[name] for name, step in reached.items() if step >= at}
                    if verdict(other, at, there, HALVING):
                        ended.add(other)
        assert "job-0" not in ended and len(ended) >= 6, (first, ended)
