"""Plots two loss curves with characters. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

_BOTH, _FIRST, _SECOND = "●", "▲", "▽"


def plot_losses(
    disturbed: Mapping[int, float],
    undisturbed: Mapping[int, float],
    *,
    marks: Mapping[int, str],
    width: int,
    height: int,
) -> list[str]:
    """The lines of a plot; x is the step, y the loss. `marks` maps a step to the character that marks it on the x axis.

    ● is a point of both runs, ▲ one of the disturbed run only, ▽ one of the undisturbed run only. Two equal runs show
    one curve of ●.
    """
    curves = [{step: loss for step, loss in curve.items() if math.isfinite(loss)} for curve in (disturbed, undisturbed)]
    steps = [step for curve in curves for step in curve]
    if not steps:
        return []
    first, last = min(steps), max(steps)
    low = min(min(curve.values(), default=math.inf) for curve in curves)
    high = max(max(curve.values(), default=-math.inf) for curve in curves)

    def column(step: int) -> int:
        return round((step - first) / max(1, last - first) * (width - 1))

    def row(loss: float) -> int:
        return round((high - loss) / (high - low or 1.0) * (height - 1))

    cells = [{(row(loss), column(step)) for step, loss in curve.items()} for curve in curves]
    lines = []
    for y in range(height):
        label = f"{high:7.3f}" if y == 0 else f"{low:7.3f}" if y == height - 1 else " " * 7
        body = "".join(_glyph((y, x) in cells[0], (y, x) in cells[1]) for x in range(width)).rstrip()
        lines.append(f"{label} ┤{body}")
    axis = ["─"] * width
    for step, mark in marks.items():
        if first <= step <= last:
            axis[column(step)] = mark
    lines.append(" " * 8 + "└" + "".join(axis))
    lines.append(" " * 9 + f"{first}" + f"{last}".rjust(width - len(str(first))) + " step")
    return lines


def _glyph(in_first: bool, in_second: bool) -> str:
    if in_first and in_second:
        return _BOTH
    return _FIRST if in_first else _SECOND if in_second else " "
