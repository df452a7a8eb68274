"""Tables from trials: min / median / max for each system and event, and the ratios to Shoal. Pure functions of text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from measurements.trial import Event, System, Trial

TITLES = {
    Event.WORKER_KILL: "SIGKILL one worker, no spare",
    Event.WORKER_KILL_STANDBY: "SIGKILL one worker, a standby replaces it",
    Event.WORKER_STOP: "SIGSTOP one worker (hang)",
    Event.RAYLET_KILL: "SIGKILL a raylet with a worker on it",
    Event.HOST_CUT: "network of a host cut",
    Event.CAPACITY: "new capacity -> larger",
    Event.SHRINK: "PATCH to one worker less",
    Event.DRAIN: "drain of a node with a worker on it",
    Event.CONTROL_PLANE_KILL: "SIGKILL + start of the control plane",
    Event.SUPERVISOR_KILL: "SIGKILL of the supervisor",
    Event.HEAD_KILL: "SIGKILL + restart of Ray's head",
    Event.SNAPSHOT_COST: "snapshots in memory, no fault",
}
NAMES = {System.SHOAL: "Shoal", System.RAY_TRAIN: "Ray Train V2 elastic", System.TORCHRUN: "torchrun"}
_HEADER = ("event", "system", "n", "pause, s", "regain, s", "steps lost", "workers", "remarks")


@dataclass(frozen=True, slots=True)
class Row:
    event: Event
    system: System
    trials: tuple[Trial, ...]

    def cells(self) -> tuple[str, ...]:
        sizes = sorted({f"{t.from_workers} → {t.to_workers}" for t in self.trials if t.to_workers is not None})
        lost = sorted({t.steps_lost for t in self.trials if t.steps_lost is not None})
        return (
            TITLES[self.event],
            NAMES[self.system],
            str(sum(not trial.failed for trial in self.trials)),
            spread([t.pause_s for t in self.trials]),
            spread([t.regain_s for t in self.trials]),
            "–" if not lost else str(lost[0]) if lost[0] == lost[-1] else f"{lost[0]} to {lost[-1]}",
            ", ".join(sizes) or "–",
            remarks(self.trials),
        )


def rows(trials: Iterable[Trial]) -> list[Row]:
    """One row per event and system, in the order of their definition."""
    found: dict[tuple[Event, System], list[Trial]] = {}
    for trial in trials:
        found.setdefault((trial.event, trial.system), []).append(trial)
    order = [(event, system) for event in Event for system in System if (event, system) in found]
    return [Row(event, system, tuple(found[event, system])) for event, system in order]


def table(trials: Sequence[Trial]) -> str:
    """A Markdown table with aligned columns."""
    lines = [_HEADER, *(row.cells() for row in rows(trials))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def ratios(trials: Sequence[Trial]) -> list[str]:
    """How many times longer a peer takes: the ratio of the medians of the same event."""
    by_key = {(row.event, row.system): row for row in rows(trials)}
    lines = []
    for (event, system), row in by_key.items():
        shoal = by_key.get((event, System.SHOAL))
        if system is not System.SHOAL and shoal is not None:
            parts = [
                f"{name} {theirs / ours:.1f} x"
                for name, get in (("pause", _pause), ("regain", _regain))
                if (theirs := median(row.trials, get)) is not None and (ours := median(shoal.trials, get))
            ]
            if parts:
                lines.append(f"{TITLES[event]}: {NAMES[system]} / Shoal: {', '.join(parts)}")
    shoal = by_key.get((Event.WORKER_KILL_STANDBY, System.SHOAL))
    for system in (System.RAY_TRAIN, System.TORCHRUN):
        row = by_key.get((Event.WORKER_KILL, system))
        if shoal and row and (theirs := median(row.trials, _regain)) and (ours := median(shoal.trials, _regain)):
            lines.append(f"{TITLES[Event.WORKER_KILL_STANDBY]}: {NAMES[system]} / Shoal: regain {theirs / ours:.1f} x")
    return lines


def median(trials: Iterable[Trial], get: Callable[[Trial], float | None]) -> float | None:
    values = [value for trial in trials if (value := get(trial)) is not None]
    return statistics.median(values) if values else None


_REMARKS = {
    "processes_died_s": "processes dead after {:.2f} s",
    "threshold_s": "hang threshold {:.2f} s",
    "reattached_s": "re-attached after {:.2f} s",
    "isolated_worker_gone_s": "isolated worker gone {:.1f} s after the link was up again",
    "overhead": "{:.1%} of the step time",
    "noise": "two jobs without snapshots differ by {:.1%}",
    "reported_share": "the service's own figure {:.2%}",
}
"""Figure of a trial -> the words for its median."""


def spread(values: Iterable[float | None]) -> str:
    """min / median / max of the values that are not None."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{known[0]:.2f} / {statistics.median(known):.2f} / {known[-1]:.2f}"


def remarks(trials: Sequence[Trial]) -> str:
    notes = sorted({trial.note for trial in trials if trial.note})
    notes += sorted({f"failed: {_gist(trial.failed)}" for trial in trials if trial.failed})
    for name, words in _REMARKS.items():
        values = [value for trial in trials if isinstance(value := trial.figures.get(name), int | float)]
        if values:
            notes.append(words.format(statistics.median(values)))
    sources = sorted({str(t.figures["state_source"]) for t in trials if "state_source" in t.figures})
    return "; ".join([*notes, *([f"from {', '.join(sources)}"] if sources else [])])


def _pause(trial: Trial) -> float | None:
    return trial.pause_s


def _regain(trial: Trial) -> float | None:
    return trial.regain_s


def _gist(failure: str) -> str:
    """The first part of a failure message, without the job's state."""
    return failure.splitlines()[0].partition(";")[0]
