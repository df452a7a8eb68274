"""The page of `shoal parity`: the losses of two jobs side by side. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.sparkline import sparkline
from shoal_api.cli.render.tables import new_table
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.quantities import count_text
from shoal_service.views import ParityView

_WIDTH = 60


def parity_page(report: ParityView, series: Sequence[Sequence[SeriesPoint]]) -> list[Any]:
    """`series`: the points of the job, and those of the job that it is compared with."""
    parts: list[Any] = [_verdict(report), _numbers(report)]
    if report.steps_compared:
        parts.append(_picture(report, series))
    if report.differs_in:
        parts += [Text("differs in", style="yellow"), _differences(report)]
    return parts


def _verdict(report: ParityView) -> Text:
    if not report.steps_compared:
        return Text("NOTHING TO COMPARE: the jobs have no step in common", style="bold red")
    if report.bit_identical:
        return Text("BIT-IDENTICAL", style="bold green")
    if report.within_tolerance:
        return Text(f"PARITY within {report.tolerance:g}", style="bold green")
    over = count_text(report.steps_over_tolerance, "step")
    return Text(f"NO PARITY: {over} with a difference above {report.tolerance:g}", "bold red")


def _numbers(report: ParityView) -> Table:
    unmatched = [
        f"{count} only in {job_id}"
        for count, job_id in (
            (report.steps_only_in_job, report.job_id),
            (report.steps_only_in_against, report.against_id),
        )
        if count
    ]
    rows = (
        ("steps compared", ", ".join([str(report.steps_compared), *unmatched])),
        ("largest relative difference", _at(report.max_rel_diff, report.max_rel_diff_step)),
        ("largest absolute difference", _at(report.max_abs_diff, report.max_abs_diff_step)),
        ("first step that differs", _step(report.first_step_different)),
        ("first step over tolerance", _step(report.first_step_over_tolerance)),
    )
    grid = Table.grid(padding=(0, 2))
    for label, value in rows:
        grid.add_row(Text(label, style="dim"), value)
    return grid


def _picture(report: ParityView, series: Sequence[Sequence[SeriesPoint]]) -> Table:
    """Both loss curves, and below them the difference on a logarithmic scale."""
    grid = Table.grid(padding=(0, 2))
    for job_id, points in zip((report.job_id, report.against_id), series, strict=True):
        grid.add_row(Text(job_id, style="dim"), Text(sparkline([p.loss for p in points], _WIDTH), style="cyan"))
    magnitudes = [math.log10(max(min(point.rel_diff, 1.0), 1e-17)) for point in report.points]
    style = "green" if report.within_tolerance else "red"
    grid.add_row(Text("difference (log)", style="dim"), Text(sparkline(magnitudes, _WIDTH), style=style))
    return grid


def _differences(report: ParityView) -> Table:
    table = new_table("key", report.job_id, report.against_id)
    for one in report.differs_in:
        table.add_row(one.path, json.dumps(one.value), json.dumps(one.against))
    return table


def _at(value: float | None, step: int | None) -> str:
    return "-" if value is None else f"{value:.3g}" + (f" at step {step}" if step is not None else "")


def _step(step: int | None) -> str:
    return "none" if step is None else str(step)
