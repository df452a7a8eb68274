"""The report of the demo: what the two runs have shown, the checks that this must pass, and how people see it: a table,
the two loss curves plotted with characters, and the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal_api.client import Client
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events import GenerationFormed
from shoal_service.core.parity import Parity
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.views import CheckpointState, EventView, IncidentView, JobView
from shoal_workers.contract import JobState

_PLOT_WIDTH = 64
_PLOT_HEIGHT = 12
_BOTH, _FIRST, _SECOND = "●", "▲", "▽"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """What the report needs of one of the two jobs."""

    job_id: str
    series: tuple[SeriesPoint, ...]
    val_bits_per_byte: float | None
    tokens_per_s: float | None
    wall_s: float | None
    checkpoint_url: str


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The last line of `shoal demo --json`, and the numbers behind the table."""

    state: JobState
    steps: int
    world_sizes: tuple[int, ...]
    layouts: tuple[str, ...]
    """The layouts over the run, one entry per change."""
    survivors: tuple[int, ...]
    """Pids of the workers that trained before the kill and in the smaller group after it."""
    incidents: tuple[IncidentView, ...]
    comparison: Parity
    val_bits_per_byte: float | None
    tokens_per_s: float | None

    def document(self) -> dict[str, Any]:
        diff = self.comparison.max_abs_diff
        return {
            "state": str(self.state),
            "steps": self.steps,
            "world_sizes": list(self.world_sizes),
            "layouts": list(self.layouts),
            "surviving_pids": list(self.survivors),
            "incidents": [_incident(incident) for incident in self.incidents],
            "max_abs_loss_diff": None if diff is None or not math.isfinite(diff) else diff,
            "val_bits_per_byte": self.val_bits_per_byte,
            "tokens_per_s": self.tokens_per_s,
        }


def read_run(client: Client, job: JobView) -> Run:
    """Read from the server what the report needs of an ended job."""
    series = tuple(sorted(client.series(job.id), key=lambda point: point.step))
    committed = [item for item in client.checkpoints(job.id) if item.state is CheckpointState.COMMITTED]
    wall_s = job.ended_at - job.started_at if job.ended_at and job.started_at else None
    return Run(
        job_id=job.id,
        series=series,
        val_bits_per_byte=job.status.val_bits_per_byte,
        tokens_per_s=compute_tokens_per_s(series, (job.status.tokens or 0) // max(1, job.status.step)),
        wall_s=wall_s,
        checkpoint_url=max(committed, key=lambda checkpoint: checkpoint.step).url if committed else "none",
    )


def render_report(
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
        (
            "world size",
            draw_arrows(outcome.world_sizes),
            draw_arrows(drop_repeats(point.world_size for point in undisturbed.series)),
        ),
        ("layout", draw_arrows(outcome.layouts), next(iter(outcome.layouts), "")),
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
        f"✓ the same model: the losses of {count_text(outcome.comparison.steps_compared, 'step')} differ "
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
        if high == low:  # one line of equal losses
            return 0
        return round((high - loss) / (high - low) * (height - 1))

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


def find_failed_checks(
    outcome: DemoOutcome, *, workers: int, tolerance: float, layouts: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return one message per failed check; empty if the demo passed."""
    broken = []
    expected = (workers, workers - 1, workers)
    if outcome.state != JobState.SUCCEEDED:
        broken.append(f"the disturbed job ended as {outcome.state}, not SUCCEEDED")
    if not is_subsequence(outcome.world_sizes, expected):
        broken.append(
            f"the world sizes were {draw_arrows(outcome.world_sizes)}; expected {draw_arrows(expected)} among them"
        )
    if not is_subsequence(outcome.layouts, layouts):
        broken.append(f"the layouts were {draw_arrows(outcome.layouts)}; expected {draw_arrows(layouts)} among them")
    if len(outcome.survivors) < workers - 1:
        broken.append(
            f"{count_text(len(outcome.survivors), 'worker')} trained before and after the kill; expected {workers - 1}"
        )
    if not outcome.incidents:
        broken.append("no incident was recorded although a worker was killed")
    compared, diff = outcome.comparison, outcome.comparison.max_abs_diff
    if unmatched := compared.steps_only_in_job + compared.steps_only_in_against:
        broken.append(f"only one of the runs has {count_text(unmatched, 'step')}")
    if diff is None:
        broken.append("the two runs have no step in common")
    elif not diff <= tolerance:
        broken.append(
            f"the losses differ by {diff:.3g} at step {compared.max_abs_diff_step}; at most {tolerance:g} is allowed"
        )
    return tuple(broken)


def read_losses(run: Run) -> Iterator[tuple[int, float]]:
    return ((point.step, point.loss) for point in run.series)


def find_world_sizes(events: Iterable[EventView]) -> tuple[int, ...]:
    """Return the world sizes over the run, one entry per change."""
    return drop_repeats(int(event.data["workers"]) for event in _formed_generations(events))


def find_layouts(events: Iterable[EventView]) -> tuple[str, ...]:
    """Return the parallel layouts over the run, one entry per change."""
    return drop_repeats(str(event.data["layout"]) for event in _formed_generations(events) if event.data.get("layout"))


def drop_repeats(values: Iterable[T]) -> tuple[T, ...]:
    """Return the values without those that equal the one before."""
    return tuple(value for value, _ in itertools.groupby(values))


def _formed_generations(events: Iterable[EventView]) -> list[EventView]:
    return sorted((event for event in events if event.type == GenerationFormed.type), key=lambda event: event.seq)


def add_detection_time(incidents: Iterable[IncidentView], killed_at: float | None) -> tuple[IncidentView, ...]:
    """Set the time to detect of the first incident. Only the demo knows when it sent the signal."""
    known = tuple(incidents)
    if killed_at is None or not known or known[0].detect_s is not None:
        return known
    return (known[0].model_copy(update={"detect_s": max(0.0, known[0].at - killed_at)}), *known[1:])


def is_subsequence(seen: Sequence[object], expected: Sequence[object]) -> bool:
    """Return True if `expected` is a subsequence of `seen`."""
    rest = iter(seen)
    return all(value in rest for value in expected)


def compute_tokens_per_s(series: Sequence[SeriesPoint], tokens_per_step: int) -> float | None:
    """Return the throughput between the ends of the first and of the last step, recoveries included."""
    ordered = sorted(series, key=lambda point: point.step)
    if len(ordered) < 2 or ordered[-1].at <= ordered[0].at:
        return None
    return tokens_per_step * (ordered[-1].step - ordered[0].step) / (ordered[-1].at - ordered[0].at)


def draw_arrows(values: Iterable[object]) -> str:
    return " -> ".join(str(value) for value in values) or "none"


def _incident(incident: IncidentView) -> dict[str, Any]:
    return {
        "cause": str(incident.cause),
        "detect_s": incident.detect_s,
        "recovery_s": incident.recovery_s,
        "steps_lost": incident.steps_lost,
        "from_workers": incident.from_workers,
        "to_workers": incident.to_workers,
    }
