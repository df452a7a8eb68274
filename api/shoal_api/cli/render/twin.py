"""The page, the JSON document and the picture of `shoal simulate --job`. Pure."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from rich.text import Text

from shoal_api.cli.render.terminal import make_table
from shoal_service.core.attempt.state import poll_wait_s
from shoal_service.core.quantities import count_text
from shoal_service.simulator.failures import DAY_S
from shoal_service.simulator.time_account import TERMS
from shoal_service.simulator.twin import TwinJob, TwinResult

_WIDTH, _ROW, _LEFT, _BAR = 760, 22, 110, 520
_BACKGROUND, _TEXT = "#ffffff", "#24292f"
_COLOURS = ("#2da44e", "#c9d1d9")
"""The first is productive time, the second everything else."""


def render_twin(job: TwinJob, result: TwinResult) -> list[Any]:
    rows = [
        (
            term.name,
            f"{result.terms[term.name] / result.seconds:.3%}",
            f"{result.terms[term.name] / 3600:,.2f}",
            term.meaning,
        )
        for term in TERMS
        if result.terms[term.name]
    ]
    lines: list[Any] = [
        Text(
            f"{job.spec.name or 'job'}: goodput {result.goodput:.2%} in {result.seconds / DAY_S:g} days on "
            f"{job.gpus:,} GPUs, {count_text(sum(result.failures.values()), 'failure')}",
            style="bold",
        ),
        make_table(("term", ">share", ">hours", "what it is"), rows),
        *(f"{name.replace('_', ' ')}: {value}" for name, value in _facts(job, result).items()),
    ]
    return lines


def _facts(job: TwinJob, result: TwinResult) -> dict[str, str]:
    document = twin_document(job, result)
    recoveries = f"{result.num_incidents:,}, median {document['recovery_s']['median']:.1f} s"
    return {
        "incidents": recoveries,
        "groups": f"{result.num_groups:,}, {result.from_storage:,} of them from storage",
        "samples_lost": f"{document['samples_lost']:,.0f}",
        "nodes missing at most": f"{document['most_missing_nodes']:,}",
        "control plane": f"{document['orders']:,} orders, {document['answers']:,} answers and "
        f"{document['polls_per_s']:,.0f} polls a second",
        "attempts ended": "; ".join(result.ends) or "none",
    }


def twin_document(job: TwinJob, result: TwinResult) -> dict[str, Any]:
    return {
        "gpus": job.gpus,
        "days": result.seconds / DAY_S,
        "goodput": result.goodput,
        "seconds": {name: round(seconds, 3) for name, seconds in result.terms.items()},
        "steps": result.steps,
        "samples_lost": round(result.steps_lost * job.spec.batch.global_size),
        "failures": dict(result.failures),
        "incidents": result.num_incidents,
        "groups": result.num_groups,
        "groups_from_storage": result.from_storage,
        "recovery_s": {
            "median": statistics.median(result.recovery_s) if result.recovery_s else 0.0,
            "most": max(result.recovery_s, default=0.0),
        },
        "most_missing_nodes": max((number for _, number in result.missing), default=0),
        "orders": round(result.orders),
        "answers": round(result.answers),
        "polls_per_s": job.gpus / poll_wait_s(job.gpus),
        "attempts_ended": result.ends,
    }


def draw_twin(job: TwinJob, result: TwinResult) -> str:
    """Return an SVG: a bar for the share of each term, and the mean speed of each day.

    Productive time has a scale of its own, since the other terms would not be seen beside it.
    """
    terms = [term for term in TERMS if result.terms[term.name] > 0]
    longest = max((result.terms[term.name] for term in terms[1:]), default=1.0)
    body = [_text(8, 20, f"{job.gpus:,} GPUs, {result.seconds / DAY_S:g} days: goodput {result.goodput:.2%}")]
    body.append(_text(_LEFT + 300, 20, f"grey bars are drawn {result.seconds / longest:.0f} times as large"))
    for number, term in enumerate(terms):
        y = 34 + _ROW * number
        share = result.terms[term.name] / result.seconds
        scale = result.seconds if term.name == "productive" else longest
        width = max(1.0, _BAR * result.terms[term.name] / scale)
        colour = _COLOURS[term.name != "productive"]
        body.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}"/>')
        body += [_text(8, y + 12, term.name), _text(_LEFT + width + 6, y + 12, f"{share:.3%}")]
    top = 34 + _ROW * len(terms) + 30
    days = find_daily_speed(result)
    points = " ".join(
        f"{_LEFT + _BAR * (day + 0.5) / len(days):.1f},{top + 80 * (1 - speed):.1f}" for day, speed in days
    )
    body.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>')
    body += [_text(8, top + 6, "100%"), _text(8, top + 86, "0%"), _text(_LEFT, top + 104, "speed of each day")]
    height = top + 120
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-size="12" '
        f'font-family="sans-serif" fill="{_TEXT}">\n<rect width="100%" height="100%" fill="{_BACKGROUND}"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{text}</text>'


def find_daily_speed(result: TwinResult) -> list[tuple[int, float]]:
    """Return the mean share of the full speed of each day."""
    changes = [*result.training, (result.seconds + 1.0, 0.0)]
    days = [0.0] * -(-int(result.seconds) // int(DAY_S))
    for (since, speed), (until, _) in pairwise(changes):
        for day in range(int(since // DAY_S), min(len(days), int(until // DAY_S) + 1)):
            days[day] += speed * max(0.0, min(until, (day + 1) * DAY_S) - max(since, day * DAY_S))
    return [(day, seconds / DAY_S) for day, seconds in enumerate(days)]
