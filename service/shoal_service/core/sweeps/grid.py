"""The grid of a sweep: `optimizer.lr=1e-4,3e-4` and others as one set of values for each job. Pure.

A value is YAML, as in `--set`. Commas inside brackets, braces and quotes do not separate values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

MAX_JOBS = 1_000
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
