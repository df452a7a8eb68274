"""Tables from trials: median and range for each system and event, and the ratios to Shoal. Pure functions of text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from measurements.trial import NODE_LOSSES, Event, Size, System, Trial, Victim

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
    Event.CONTROL: "control: no fault",
}
NAMES = {
    System.SHOAL: "Shoal",
    System.RAY_TRAIN: "Ray Train V2 elastic",
    System.TORCHRUN: "torchrun",
    System.TORCHFT: "torchft",
}
_VICTIMS = {
    None: "",
    Victim.AWAY: "",
    Victim.SUPERVISOR: ", the supervisor's node",
    Victim.HEAD: ", the head's node",
}
_HEADER = (
    "event",
    "system",
    "n",
    "next step, s",
    "pause, s",
    "regain, s",
    "full strength, s",
    "samples in the window",
    "steps lost",
    "workers",
    "remarks",
)
Key = tuple[Event, Size, Victim | None, System]


@dataclass(frozen=True, slots=True)
class Row:
    """The trials of one cell: one event, model, place of the victim and system."""

    event: Event
    params: Size
    victim: Victim | None
    system: System
    trials: tuple[Trial, ...]

    @property
    def title(self) -> str:
        params = "" if self.params is Size.SMALL else f", {self.params} parameters"
        return f"{TITLES[self.event]}{_VICTIMS[self.victim]}{params}"

    def cells(self) -> tuple[str, ...]:
        sizes = sorted({f"{t.from_workers} → {t.to_workers}" for t in self.trials if t.to_workers is not None})
        lost = sorted({t.steps_lost for t in self.trials if t.steps_lost is not None})
        return (
            self.title,
            NAMES[self.system],
            str(sum(not trial.failed for trial in self.trials)),
            spread([t.next_step_s for t in self.trials]),
            spread([t.pause_s for t in self.trials]),
            spread([t.regain_s for t in self.trials]),
            self._full_strength(),
            spread([t.samples for t in self.trials], digits=0),
            "–" if not lost else str(lost[0]) if lost[0] == lost[-1] else f"{lost[0]} to {lost[-1]}",
            ", ".join(sizes) or "–",
            remarks(self.trials),
        )

    def _full_strength(self) -> str:
        watched = [t for t in self.trials if t.window_s is not None and t.event is not Event.CONTROL]
        never = [t for t in watched if t.full_strength_s is None]
        known = spread([t.full_strength_s for t in watched])
        if not never:
            return known
        late = f"{len(never)} of {len(watched)} not within {never[0].window_s:.0f} s"
        return late if len(never) == len(watched) else f"{known}; {late}"


def rows(trials: Iterable[Trial]) -> list[Row]:
    """One row per cell, in the order of the definition of events, models, victims and systems."""
    found: dict[Key, list[Trial]] = {}
    for trial in trials:
        found.setdefault((trial.event, trial.params, trial.victim, trial.system), []).append(trial)
    order = [
        (event, params, victim, system)
        for event in Event
        for params in Size
        for victim in (None, *Victim)
        for system in System
        if (event, params, victim, system) in found
    ]
    return [Row(*key, tuple(found[key])) for key in order]


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
    """How many times longer a peer takes: the ratio of the medians of the same event, model and place of the victim.

    Only of trials that one call of the benchmark has done, because the machine's speed changes from call to call.
    """
    lines = []
    for run in dict.fromkeys(trial.run for trial in trials if trial.run):
        lines += _ratios_of_one_run([trial for trial in trials if trial.run == run])
    return lines


def _ratios_of_one_run(trials: Sequence[Trial]) -> list[str]:
    by_key = {(row.event, row.params, row.victim, row.system): row for row in rows(trials)}
    lines = []
    for (event, params, victim, system), row in by_key.items():
        shoal = by_key.get((event, params, victim, System.SHOAL))
        if system is not System.SHOAL and event is not Event.CONTROL and shoal is not None:
            parts = [
                f"{name} {theirs / ours:.1f} x"
                for name, get in (("next step", _next_step), ("pause", _pause), ("regain", _regain))
                if (theirs := median(row.trials, get)) is not None and (ours := median(shoal.trials, get))
            ]
            if parts:
                lines.append(f"{row.title}: {NAMES[system]} / Shoal: {', '.join(parts)}")
    for params in Size:
        shoal = by_key.get((Event.WORKER_KILL_STANDBY, params, None, System.SHOAL))
        for system in (System.RAY_TRAIN, System.TORCHRUN, System.TORCHFT):
            peer = by_key.get((Event.WORKER_KILL, params, None, system))
            if shoal and peer and (theirs := median(peer.trials, _regain)) and (ours := median(shoal.trials, _regain)):
                lines.append(f"{shoal.title}: {NAMES[system]} / Shoal: regain {theirs / ours:.1f} x")
    return lines


def node_losses(trials: Sequence[Trial]) -> list[str]:
    """What a lost node cost Shoal, against the bound of at most one completed step."""
    lines = []
    for row in rows(trials):
        known = [t for t in row.trials if t.steps_lost is not None and t.pause_s is not None and t.regain_s is not None]
        if row.event not in NODE_LOSSES or row.system is not System.SHOAL or not known:
            continue
        lost = [t.steps_lost or 0 for t in known]
        prompt = sum((t.regain_s or 0) <= max(0.0, t.pause_s or 0) + 1.5 * (t.step_s or 0) for t in known)
        lines.append(
            f"{row.title}: no completed step lost in {sum(n == 0 for n in lost)} of {len(lost)} trials "
            f"({sum(n == 0 for n in lost) / len(lost):.0%}), at most {max(lost)}; "
            f"regain within pause + 1.5 steps in {prompt} of {len(known)}"
        )
    return lines


def median(trials: Iterable[Trial], get: Callable[[Trial], float | None]) -> float | None:
    values = [value for trial in trials if (value := get(trial)) is not None]
    return statistics.median(values) if values else None


_REMARKS = {
    "processes_died_s": "processes dead after {:.2f} s",
    "reattached_s": "re-attached after {:.2f} s",
    "isolated_worker_gone_s": "isolated worker gone {:.1f} s after the link was up again",
    "overhead": "{:.1%} of the step time",
    "noise": "two jobs without snapshots differ by {:.1%}",
    "reported_share": "the service's own figure {:.2%}",
}
"""Figure of a trial -> the words for its median."""


def spread(values: Iterable[float | None], *, digits: int = 2) -> str:
    """Median (min–max) of the values that are not None."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:.{digits}f}"
    low, middle, high = (f"{value:.{digits}f}" for value in (known[0], statistics.median(known), known[-1]))
    return f"{middle} ({low}–{high})"


def remarks(trials: Sequence[Trial]) -> str:
    notes = sorted({trial.note for trial in trials if trial.note})
    notes += sorted({f"failed: {_gist(trial.failed)}" for trial in trials if trial.failed})
    for name, words in _REMARKS.items():
        values = [value for trial in trials if isinstance(value := trial.figures.get(name), int | float)]
        if values:
            notes.append(words.format(statistics.median(values)))
    sources = sorted({str(t.figures["state_source"]) for t in trials if "state_source" in t.figures})
    return "; ".join([*notes, *([f"from {', '.join(sources)}"] if sources else [])])


def _next_step(trial: Trial) -> float | None:
    return trial.next_step_s


def _pause(trial: Trial) -> float | None:
    return trial.pause_s


def _regain(trial: Trial) -> float | None:
    return trial.regain_s


def _gist(failure: str) -> str:
    """The first part of a failure message, without the job's state."""
    return failure.splitlines()[0].partition(";")[0]
