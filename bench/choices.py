"""Command-line options that take several of a fixed set of names, comma-separated: `--events worker_kill,shrink`.

Used by the benchmarks that have parts. A wrong name ends the command with the list of the valid ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=str)


def some_of(valid: Sequence[Name]) -> Callable[[str], tuple[Name, ...]]:
    """For `type=` of an option. Returns the chosen names, each once, in the order of `valid`."""

    def chosen(text: str) -> tuple[Name, ...]:
        names = text.split(",")
        if unknown := [name for name in names if name not in valid]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; valid are {', '.join(valid)}")
        return tuple(name for name in valid if name in names)

    return chosen
