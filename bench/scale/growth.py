"""How figures grow with a number: the tables of the benchmarks of this folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def print_growth(rows: Sequence[Mapping[str, Any]], figures: Mapping[str, str]) -> None:
    """A table with a line for each of `figures` (key -> words), a column for each row, and the exponents.

    Args:
        rows: with the figures, and the number of workers as `workers`.
    """
    numbers = [row["workers"] for row in rows]
    print("\n| workers | " + " | ".join(str(n) for n in numbers) + " | exponent |")
    print("|---|" + "---|" * (len(rows) + 1))
    for key, words in figures.items():
        values = [row[key] for row in rows]
        print(f"| {words} | " + " | ".join(f"{value:.3g}" for value in values) + f" | {exponent(numbers, values)} |")


def exponent(numbers: Sequence[float], values: Sequence[float]) -> str:
    """Slope of the line through the logarithms; of the larger half, where the constant part no longer hides it."""
    points = [(math.log(n), math.log(v)) for n, v in zip(numbers, values, strict=True) if v > 0][-3:]
    if len(points) < 2:
        return "–"
    mean_x, mean_y = (statistics.fmean(p[i] for p in points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return f"{slope:.2f}"
