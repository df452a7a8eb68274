"""The values of the jobs of a sweep: of a grid, and drawn at random."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.sweeps import (
    Interval,
    InvalidGrid,
    combinations,
    document_of,
    draws,
    labels_of,
    parse_axis,
    parse_interval,
    rank,
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


LISTS = {"optimizer.name": ("adam", "sgd")}
INTERVALS = {"optimizer.lr": Interval(1e-5, 1e-1, is_log=True), "model.layers": Interval(2, 5, is_whole=True)}


def test_a_draw_depends_on_its_number_and_not_on_how_many_there_are() -> None:
    few, many = (draws(LISTS, INTERVALS, samples=number, seed=7) for number in (5, 50))
    assert many[:5] == few and draws(LISTS, INTERVALS, samples=5, seed=8) != few
    assert {one["optimizer.name"] for one in many} == {"adam", "sgd"}
    assert {one["model.layers"] for one in many} == {"2", "3", "4", "5"}


def test_a_logarithmic_range_has_as_many_values_in_each_order_of_magnitude() -> None:
    rates = [
        float(one["optimizer.lr"])
        for one in draws({}, {"optimizer.lr": INTERVALS["optimizer.lr"]}, samples=400, seed=0)
    ]
    below = [sum(rate < bound for rate in rates) for bound in (1e-4, 1e-3, 1e-2)]
    assert all(abs(number - 100 * place) < 50 for place, number in enumerate(below, 1)) and min(rates) >= 1e-5


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.booleans(), st.integers(0, 2**53))
def test_each_drawn_number_is_within_its_range(low: float, width: float, is_whole: bool, seed: int) -> None:
    low, high = (float(round(low)), float(round(low) + round(width) + 1)) if is_whole else (low, low + width)
    [one] = draws({}, {"a": Interval(low, high, is_whole=is_whole)}, samples=1, seed=seed)
    spread = 0 if is_whole else 1e-3 * max(abs(low), abs(high))  # four significant digits
    assert low - spread <= float(one["a"]) <= high + spread


def test_no_set_of_values_is_drawn_twice_and_too_many_are_refused() -> None:
    lists = {"seed": ("1", "2"), "name": ("a", "b")}
    assert len({tuple(one.items()) for one in draws(lists, {}, samples=4, seed=1)}) == 4
    with pytest.raises(InvalidGrid, match="samples is 5, and 500 draws gave only 4 different"):
        draws(lists, {}, samples=5, seed=1)


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
        draws({}, {"lr": interval}, samples=1, seed=0)


def test_a_key_with_a_list_and_a_range_is_refused() -> None:
    with pytest.raises(InvalidGrid, match="Leave one of the two out"):
        draws({"lr": ("1", "2")}, {"lr": Interval(1, 2)}, samples=1, seed=0)


def test_a_range_is_read_from_the_command_line() -> None:
    assert parse_interval("optimizer.lr=1e-5:1e-2:log") == ("optimizer.lr", Interval(1e-5, 1e-2, is_log=True))
    assert parse_interval("model.layers=2:8") == ("model.layers", Interval(2, 8, is_whole=True))
    for text in ("lr", "lr=1", "lr=a:b", "=1:2", "lr=1:2:exp", "lr=1:2:3:4"):
        with pytest.raises(InvalidGrid, match=r"use KEY\.PATH=LOW:HIGH"):
            parse_interval(text)


def test_the_best_job_is_first_and_those_without_a_loss_are_last() -> None:
    values = {"a": (None, None), "b": (None, 2.0), "c": (1.0, 9.0), "d": (math.nan, 0.5), "e": (3.0, 0.1)}
    assert sorted(values, key=lambda name: rank(*values[name])) == ["c", "b", "e", "d", "a"]
