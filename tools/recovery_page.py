"""Writes the trials of `make bench-recovery` and the fault matrix into docs/recovery.md, and draws the phases.

    python tools/recovery_page.py build/recovery.jsonl   copies new trials to docs/measured/recovery.jsonl first
    python tools/recovery_page.py                        generates page and picture from docs/measured/recovery.jsonl

No figure is typed by hand. Page, picture and JSON lines are committed together; a test compares them.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import yaml

from measurements.recovery_tables import NAMES, TITLES, node_losses, ratios, table
from measurements.trial import Event, System, Trial, read_trials

DOCS = Path(__file__).resolve().parent.parent / "docs"
TRIALS = DOCS / "measured" / "recovery.jsonl"
PAGE = DOCS / "recovery.md"
MATRIX = DOCS.parent / "tests" / "chaos" / "fault_matrix.yaml"
PICTURE = DOCS / "images" / "recovery.svg"
_BEGIN = "<!-- results: made by tools/recovery_page.py from docs/measured/recovery.jsonl -->"
_MATRIX_BEGIN = "<!-- matrix: made by tools/recovery_page.py from tests/chaos/fault_matrix.yaml -->"
_END = "<!-- end -->"

_PHASES = (
    ("noticed", "#f92672"),
    ("quiesce", "#fd971f"),
    ("plan", "#e6db74"),
    ("form", "#a6e22e"),
    ("restore", "#66d9ef"),
    ("first step", "#ae81ff"),
)
_BACKGROUND, _TEXT, _DIM = "#272822", "#f8f8f2", "#a59f85"
_WIDTH, _LEFT, _BAR, _LINE = 960, 20, 22, 34


def main() -> None:
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], TRIALS)
    trials = read_trials(TRIALS)
    page = with_results(PAGE.read_text(encoding="utf-8"), trials, machine())
    PAGE.write_text(with_matrix(page), encoding="utf-8")
    PICTURE.write_text(picture(trials), encoding="utf-8")


def machine() -> dict[str, str]:
    """The machine that measured the trials, from their first line."""
    found: dict[str, str] = json.loads(TRIALS.read_text(encoding="utf-8").splitlines()[0])["machine"]
    return found


def with_results(page: str, trials: Sequence[Trial], where: dict[str, str]) -> str:
    """The page with its results generated; the rest is written by hand."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END, 1)
    parts = [
        f"Measured on {where['cpu']}, {where['memory']}; {where['system']}; {where['software']}.",
        "Figures are medians, with the range in brackets.",
        "",
        table(trials),
        "",
        *(f"- {line}" for line in [*ratios(trials), *node_losses(trials)]),
        "",
        "Where the time goes, medians in milliseconds, from Shoal's incident records:",
        "",
        _phase_table(trials),
        "",
    ]
    return f"{before}{_BEGIN}\n" + "\n".join(parts) + f"{_END}{after}"


def with_matrix(page: str) -> str:
    """The page with the fault matrix generated from its definition."""
    matrix = yaml.safe_load(MATRIX.read_text(encoding="utf-8"))
    names = list(matrix["moments"])
    words = {name: name.replace("_", " ") for name in names}
    lines = [
        f"Moments: {', '.join(words.values())}.",
        "",
        "| fault | also in `make test-slow` | never |",
        "|---|---|---|",
    ]
    chains = [cells for name, cells in matrix["sample"].items() if name not in matrix["rare"]]
    sampled = [tuple(cell) for cells in chains for cell in cells]
    reasons = []
    for fault in matrix["faults"]:
        never = matrix["never"].get(fault, {})
        in_sample = ", ".join(words[name] for name in names if (fault, name) in sampled)
        left_out = ", ".join(words[name] for name in names if name in never)
        lines.append(f"| {fault.replace('_', ' ')} | {in_sample} | {left_out} |")
        reasons += [
            f"- *{fault.replace('_', ' ')}* at *{words[name]}* never occurs: {never[name].strip()}"
            for name in names
            if name in never
        ]
    before, rest = page.split(_MATRIX_BEGIN)
    _, after = rest.split(_END, 1)
    table_and_reasons = "\n".join([*lines, "", "Every other cell runs in `make test-all`.", "", *reasons, ""])
    return f"{before}{_MATRIX_BEGIN}\n{table_and_reasons}{_END}{after}"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Medians over the trials of one event, seconds."""

    event: Event
    num_trials: int
    phases: tuple[float, ...]
    """In the order of _PHASES. The first step counts only the time beyond a median step."""
    pause_s: float


def breakdowns(trials: Sequence[Trial]) -> list[Breakdown]:
    found = []
    for event in Event:
        own = [t for t in trials if t.system is System.SHOAL and t.event is event and "quiesce_s" in t.figures]
        if own:
            found.append(
                Breakdown(
                    event,
                    len(own),
                    tuple(statistics.median(column) for column in zip(*map(_phases, own), strict=True)),
                    statistics.median(t.pause_s or 0.0 for t in own),
                )
            )
    return found


def _phases(trial: Trial) -> tuple[float, ...]:
    get = trial.figures.get
    first_step_s = max(0.0, get("first_step_s", 0.0) - (trial.step_s or 0.0))
    named = (get(name, 0.0) for name in ("noticed_s", "quiesce_s", "plan_s", "form_s", "restore_s"))
    return (*(max(0.0, value) for value in named), first_step_s)


def _phase_table(trials: Sequence[Trial]) -> str:
    lines = [
        "| event | " + " | ".join(name for name, _ in _PHASES) + " | sum | pause |",
        "|---" * (len(_PHASES) + 3) + "|",
    ]
    for one in breakdowns(trials):
        cells = [f"{1000 * seconds:.0f}" for seconds in (*one.phases, sum(one.phases), one.pause_s)]
        lines.append(f"| {TITLES[one.event]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(trials: Sequence[Trial]) -> str:
    """Top: the pause of each system on one scale. Bottom: the phases of Shoal's pause."""
    pauses = [
        (f"{NAMES[system]}: {TITLES[event]}", statistics.median(known), system is System.SHOAL)
        for event in (Event.WORKER_KILL, Event.WORKER_KILL_STANDBY, Event.RAYLET_KILL)
        for system in System
        if (known := [t.pause_s for t in trials if (t.event, t.system) == (event, system) and t.pause_s is not None])
    ]
    parts: list[str] = []
    y = _heading(parts, 30, "Median pause after a failure, seconds")
    longest = max((pause for _, pause, _ in pauses), default=1.0)
    for name, pause, is_ours in pauses:
        colour = "#a6e22e" if is_ours else "#75715e"
        y = _bar(parts, y, name, [(pause, colour)], longest, f"{pause:.2f} s")
    y = _heading(parts, y + 24, "The phases of Shoal's pause, milliseconds")
    legend_x = _LEFT
    for name, colour in _PHASES:
        parts.append(f'<rect x="{legend_x}" y="{y - 12}" width="12" height="12" fill="{colour}"/>')
        parts.append(_words(legend_x + 17, y - 2, name, _DIM))
        legend_x += 30 + 8 * len(name)
    y += 14
    found = breakdowns(trials)
    longest = max((sum(one.phases) for one in found), default=1.0)
    for one in found:
        pieces = [(seconds, colour) for seconds, (_, colour) in zip(one.phases, _PHASES, strict=True)]
        y = _bar(parts, y, TITLES[one.event], pieces, longest, f"{1000 * sum(one.phases):.0f} ms")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" font-size="13" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{_BACKGROUND}"/>\n{body}\n</svg>\n'
    )


def _heading(parts: list[str], y: int, text: str) -> int:
    parts.append(f'<text x="20" y="{y}" fill="{_TEXT}" font-weight="bold">{escape(text)}</text>')
    return y + 24


def _bar(parts: list[str], y: int, name: str, pieces: Sequence[tuple[float, str]], longest: float, figure: str) -> int:
    shown = name if len(name) <= 60 else name[:59] + "…"
    parts.append(_words(20, y + 11, shown, _TEXT, size=11))
    x = float(_LEFT)
    room = _WIDTH - _LEFT - 90
    for value, colour in pieces:
        width = room * value / longest
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 15}" width="{max(width, 0.5):.1f}" height="{_BAR - 8}" fill="{colour}"/>'
        )
        x += width
    parts.append(_words(x + 8, y + 27, figure, _TEXT))
    return y + _LINE + 4


def _words(x: float, y: float, text: str, colour: str, size: int = 13) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="{size}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
