"""Grids: values, combinations, the labels of a job, and what is refused."""

from __future__ import annotations

import pytest

from shoal_service.core.sweeps.grid import InvalidGrid, combinations, document_of, labels_of, parse_axis


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
