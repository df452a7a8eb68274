"""An SVG of who had how many workers over time: one panel for each policy, one band for each job.

Bands are stacked in the order in which the jobs first started, so a band's height is the job's number of workers, and
what is left up to the dashed line is idle. Called by replay.py and simulation_page.py; pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal_api.cli.render.plan import Simulated
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.simulator.engine import JobRun, SimulationResult
from shoal_service.simulator.traces import Capacity

_WIDTH, _HEIGHT = 880, 170
"""Width and height of one panel's area, in pixels; a band is drawn per pixel column."""
_LEFT, _TOP, _GAP, _BOTTOM = 46, 26, 34, 40
_FONT = 'font-family="DejaVu Sans, Verdana, sans-serif"'
_LEAST_LABEL = (7.0, 11.0)
"""Pixels per character, and in height, that a band must have for a job's name."""
_TICKS_S = (60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class Panel:
    """One run of one policy."""

    title: str
    run: SimulationResult


def draw(panels: Sequence[Panel], capacity: Capacity) -> str:
    """The SVG. All panels have the same scales."""
    end_s = max((panel.run.ended_at for panel in panels), default=0.0) or 1.0
    most = max(nodes for _, nodes in capacity.steps) * capacity.workers_per_node or 1
    height = _TOP + len(panels) * (_HEIGHT + _GAP) + _BOTTOM - _GAP
    width = _LEFT + _WIDTH + 12
    colours = _colours(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        top = _TOP + number * (_HEIGHT + _GAP)
        parts += _panel(panel, capacity, top, end_s, most, colours)
    parts += _time_axis(end_s, height - _BOTTOM)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, capacity: Capacity, top: int, end_s: float, most: int, colours: dict[str, str]) -> list[str]:
    scale = _HEIGHT / most
    jobs = sorted((run for run in panel.run.jobs if run.started_at is not None), key=_started)
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}" {_FONT} font-size="12" fill="#222">{escape(panel.title)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="#f4f4f2"/>',
    ]
    below = [0] * _WIDTH
    labels: list[str] = []
    for run in jobs:
        bands = _bands(run, below, end_s)
        if not bands:
            continue
        path = "".join(
            f"M{_LEFT + left} {top + _HEIGHT - (base + workers) * scale:.1f}h{width}v{workers * scale:.1f}h-{width}z"
            for left, width, base, workers in bands
        )
        name = escape(run.job.job_id)
        parts.append(f'<path d="{path}" fill="{colours[run.job.job_id]}"><title>{name}</title></path>')
        left, width, base, workers = max(bands, key=lambda band: band[1] * band[3])
        if width >= _LEAST_LABEL[0] * len(run.job.job_id) and workers * scale >= _LEAST_LABEL[1]:
            x, y = _LEFT + left + width / 2, top + _HEIGHT - (base + workers / 2) * scale + 3.5
            labels.append(f'<text x="{x:.0f}" y="{y:.1f}" {_FONT} font-size="10" text-anchor="middle">{name}</text>')
    return [*parts, *labels, _capacity_line(capacity, top, end_s, scale), *_worker_axis(top, most, scale)]


def _bands(run: JobRun, below: list[int], end_s: float) -> list[tuple[int, int, int, int]]:
    """(first column, number of columns, workers below it, workers) of each rectangle; `below` grows by them."""
    times = [at for at, _ in run.history]
    bands: list[tuple[int, int, int, int]] = []
    first = int(times[0] / end_s * _WIDTH)
    for column in range(first, _WIDTH):
        at = bisect_right(times, (column + 0.5) * end_s / _WIDTH) - 1
        workers = run.history[at][1] if at >= 0 else 0
        if workers:
            base = below[column]
            left, width, *same = bands[-1] if bands else (0, -1, 0, 0)
            if left + width == column and same == [base, workers]:
                bands[-1] = (left, width + 1, base, workers)
            else:
                bands.append((column, 1, base, workers))
            below[column] += workers
        elif run.finished_at is not None and at == len(times) - 1:
            break
    return bands


def _capacity_line(capacity: Capacity, top: int, end_s: float, scale: float) -> str:
    path = ""
    for index, (at, nodes) in enumerate(capacity.steps):
        if at > end_s:
            break
        x, y = _LEFT + at / end_s * _WIDTH, top + _HEIGHT - nodes * capacity.workers_per_node * scale
        path += f"H{x:.1f}V{y:.1f}" if index else f"M{x:.1f} {y:.1f}"
    return f'<path d="{path}H{_LEFT + _WIDTH}" fill="none" stroke="#444" stroke-dasharray="4 3"/>'


def _worker_axis(top: int, most: int, scale: float) -> list[str]:
    return [
        f'<text x="{_LEFT - 6}" y="{top + _HEIGHT - workers * scale + 4:.1f}" {_FONT} font-size="10" fill="#555" '
        f'text-anchor="end">{workers}</text>'
        for workers in sorted({0, most // 2, most})
    ]


def _time_axis(end_s: float, y: int) -> list[str]:
    tick_s = next((tick for tick in _TICKS_S if end_s / tick <= _MOST_TICKS), _TICKS_S[-1])
    unit_s, unit = (3600, "h") if tick_s >= 900 else (60, "min")
    parts: list[str] = []
    for number in range(math.floor(end_s / tick_s) + 1):
        x = _LEFT + number * tick_s / end_s * _WIDTH
        parts.append(f'<path d="M{x:.1f} {y}v5" stroke="#555"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{y + 17}" {_FONT} font-size="10" fill="#555" text-anchor="middle">'
            f"{number * tick_s / unit_s:g} {unit}</text>"
        )
    return [*parts, f'<text x="4" y="{y + 32}" {_FONT} font-size="10" fill="#555">workers over time</text>']


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """The same colour for a job in every panel; neighbours differ."""
    jobs = panels[0].run.jobs if panels else ()
    return {
        run.job.job_id: f"hsl({number * 137.5 % 360:.0f},{45 + number % 3 * 10}%,{62 + number % 4 * 5}%)"
        for number, run in enumerate(jobs)
    }


def _started(run: JobRun) -> float:
    return run.started_at or 0.0


def title(result: Simulated) -> str:
    """Return the title of the panel of a run."""
    metrics = result.metrics
    moves = f"{count_text(metrics.num_moves, 'move')}, {count_text(metrics.num_preemptions, 'preemption')}"
    return f"{result.policy}: mean completion time {_hours(metrics.mean_jct_h)}, {moves}"


def _hours(hours: float) -> str:
    return duration_text(hours * 3600.0) if math.isfinite(hours) else "-"
