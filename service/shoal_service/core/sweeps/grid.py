"""The grid of a sweep: `optimizer.lr=1e-4,3e-4` and others as one set of values for each job. Pure.

A value is YAML, as in `--set`. Commas inside brackets, braces and quotes do not separate values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from shoal_service.core.key_paths import NotASection, assign

MAX_JOBS = 1_000
_NOT_OF_A_GRID = {
    "name": "the jobs are numbered",
    "sweep": "all jobs are of this one",
    "project": "a sweep is of one project",
}
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""


class InvalidGrid(ValueError):
    """The message names the axis and the form."""


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """KEY.PATH and the texts of its values. Raises InvalidGrid."""
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in _split(values))
    if not key.strip() or not equals or not all(found) or not found:
        raise InvalidGrid(f"--grid {text!r}: use KEY.PATH=VALUE,VALUE,..., for example optimizer.lr=1e-4,3e-4.")
    if len(set(found)) < len(found):
        raise InvalidGrid(f"--grid {text!r}: a value is given twice.")
    return key.strip(), found


def combinations(axes: Sequence[tuple[str, tuple[str, ...]]]) -> list[dict[str, str]]:
    """Every combination, by key path; the last axis changes fastest. Raises InvalidGrid."""
    keys = [key for key, _ in axes]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise InvalidGrid(f"--grid names {', '.join(sorted(twice))} twice: give all of its values in one --grid.")
    number = 1
    for _, values in axes:
        number *= len(values)
    if number > MAX_JOBS:
        raise InvalidGrid(
            f"The grid has {number:,} combinations, and a sweep at most {MAX_JOBS:,} jobs: leave some out."
        )
    return [dict(zip(keys, chosen, strict=True)) for chosen in product(*(values for _, values in axes))]


def document_of(shared: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the spec that the jobs share, with these values by key path. Raises InvalidGrid."""
    document: dict[str, Any] = copy.deepcopy(dict(shared))
    for path, value in values.items():
        top = path.partition(".")[0]
        if not all(path.split(".")):
            raise InvalidGrid(f"grid: {path!r} is not a path of keys, for example optimizer.lr.")
        if top in _NOT_OF_A_GRID:
            raise InvalidGrid(f"grid: {path} cannot be varied, since {_NOT_OF_A_GRID[top]}.")
        try:
            assign(document, path, copy.deepcopy(value))
        except NotASection as error:
            raise InvalidGrid(f"grid: {error}.") from None
    return document


def words(labels: Mapping[str, str]) -> str:
    """The values of one job, for people."""
    return " ".join(f"{name}={value}" for name, value in labels.items())


def label_names(keys: Sequence[str]) -> dict[str, str]:
    """The label for each key path: its last part, or all of it where that is not unique or is taken by the sweep."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: short if last.count(short) == 1 and short != "sweep" else key
        for key, short in zip(keys, last, strict=True)
    }


def labels_of(chosen: Mapping[str, str]) -> dict[str, str]:
    names = label_names(list(chosen))
    return {names[key]: value.strip("'\"")[:255] for key, value in chosen.items()}


def _split(text: str) -> list[str]:
    parts, depth, quote, part = [], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES:
            quote = char
        else:
            depth += (char in _OPENING) - (char in _CLOSING)
        if char == "," and not quote and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    return [*parts, part]
