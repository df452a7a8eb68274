"""The report at the end of the demo: a table, the two loss curves plotted with characters, the result. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal_api.demo.outcome import DemoOutcome, arrows, changes
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.quantities import count_text, duration_text

_PLOT_WIDTH = 64
_PLOT_HEIGHT = 12
_BOTH, _FIRST, _SECOND = "●", "▲", "▽"


@dataclass(frozen=True, slots=True)
class Run:
    """What the report needs of one of the two jobs."""

    job_id: str
    series: tuple[SeriesPoint, ...]
    val_bits_per_byte: float | None
    tokens_per_s: float | None
    wall_s: float | None
    checkpoint_url: str


def report(
    outcome: DemoOutcome, disturbed: Run, undisturbed: Run, broken: Sequence[str], *, url: str, tolerance: float
) -> list[RenderableType]:
    """Return the parts of the report, in the order in which they are printed."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_column()
    table.add_row("", Text("with SIGKILL", style="bold"), Text("undisturbed", style="bold"))
    for label, left, right in _rows(outcome, disturbed, undisturbed):
        table.add_row(label, left, right)
    return [
        Text(),
        Panel(Group(table, Text(), _verdict(outcome, broken, tolerance)), title="shoal demo", border_style="cyan"),
        Group(*(Text(line, style="cyan") for line in _curves(outcome, disturbed, undisturbed))),
        Text("loss: ● both runs, ▲ only with SIGKILL, ▽ only undisturbed; ✗ the group shrinks, ↑ the group grows"),
        Text(f"jobs          {url}/v1/jobs/{disturbed.job_id}  {url}/v1/jobs/{undisturbed.job_id}", style="dim"),
        Text(f"checkpoints   {disturbed.checkpoint_url}", style="dim"),
    ]


def _rows(outcome: DemoOutcome, disturbed: Run, undisturbed: Run) -> list[tuple[str, str, str]]:
    rows = [
        ("steps", str(outcome.steps), str(max((point.step for point in undisturbed.series), default=0))),
        ("world size", arrows(outcome.world_sizes), arrows(sizes_by_step(undisturbed.series))),
        ("layout", arrows(outcome.layouts), next(iter(outcome.layouts), "")),
        ("surviving workers", ", ".join(f"pid {pid}" for pid in outcome.survivors), ""),
    ]
    for incident in outcome.incidents:
        to_workers = "? workers" if incident.to_workers is None else count_text(incident.to_workers, "worker")
        ranks = ", ".join(str(rank) for rank in incident.ranks)
        rows += [
            (
                "incident",
                f"{incident.cause}, rank {ranks}: {incident.from_workers} -> {to_workers}",
                "none",
            ),
            ("  detected in", duration_text(incident.detect_s), ""),
            ("  training again in", duration_text(incident.recovery_s), ""),
            ("  steps lost", "?" if incident.steps_lost is None else str(incident.steps_lost), "0"),
        ]
    runs = (disturbed, undisturbed)
    last = [f"{run.series[-1].loss:.6f}" if run.series else "?" for run in runs]
    bits = [f"{run.val_bits_per_byte:.4f}" if run.val_bits_per_byte is not None else "?" for run in runs]
    speed = [f"{run.tokens_per_s:,.0f}" if run.tokens_per_s is not None else "?" for run in runs]
    rows += [
        ("last loss", last[0], last[1]),
        ("validation, bits per byte", bits[0], bits[1]),
        ("tokens/s, recovery included", speed[0], speed[1]),
        ("wall clock", duration_text(disturbed.wall_s), duration_text(undisturbed.wall_s)),
    ]
    return rows


def _verdict(outcome: DemoOutcome, broken: Sequence[str], tolerance: float) -> Text:
    if broken:
        return Text("\n".join(f"✗ {line}" for line in broken), style="bold red")
    diff = outcome.comparison.max_abs_diff
    return Text(
        f"✓ the same model: the losses of {count_text(outcome.comparison.num_steps, 'step')} differ "
        f"by at most {diff:.1e} "
        f"(allowed: {tolerance:g})",
        style="bold green",
    )


def _curves(outcome: DemoOutcome, disturbed: Run, undisturbed: Run) -> list[str]:
    marks: dict[int, str] = {}
    for before, after in itertools.pairwise(disturbed.series):
        if after.world_size != before.world_size:
            marks[after.step] = "✗" if after.world_size < before.world_size else "↑"
    return plot_losses(
        {point.step: point.loss for point in disturbed.series},
        {point.step: point.loss for point in undisturbed.series},
        marks=marks,
        width=_PLOT_WIDTH,
        height=_PLOT_HEIGHT,
    )


def sizes_by_step(series: Sequence[SeriesPoint]) -> tuple[int, ...]:
    """Return the world sizes in the order of the steps, one entry per change."""
    return changes(point.world_size for point in series)


def plot_losses(
    disturbed: Mapping[int, float],
    undisturbed: Mapping[int, float],
    *,
    marks: Mapping[int, str],
    width: int,
    height: int,
) -> list[str]:
    """Return the lines of a plot; x is the step, y the loss. `marks` maps a step to the character that marks it on the
    x axis.

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
        return round((high - loss) / (high - low or 1.0) * (height - 1))  # 1.0: all losses may be equal

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
