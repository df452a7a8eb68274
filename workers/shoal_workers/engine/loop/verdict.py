"""Compares the trials of a loop: what differs, and which variables carry it. Functions of what the trials have shown,
and of the program's text. Called by trials.py.

Losses and tracked state of all trials have to be equal. If not, the variables that have another value when a trial
enters the function anew than they had in the undisturbed run are what is not tracked.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_workers.engine.loop.variables import Difference, difference, is_below, place_of

UNDISTURBED, REPEATED, NEWCOMER, SURVIVOR, SPLIT = "undisturbed", "repeated", "newcomer", "survivor", "split"
NOISY = ("noisy", "noisy the other way")
_OTHER_RANK = f"{SPLIT} 1"
WITH_TWO = "two workers"
_WHAT = {
    NEWCOMER: "a worker that joins after step {}",
    SURVIVOR: "a worker whose group breaks after step {}",
    SPLIT: WITH_TWO,
    _OTHER_RANK: WITH_TWO,
}


@dataclass
class Trial:
    """What one rank of a trial has shown."""

    entered_after: int
    steps_after: int
    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    """Loss, gradient norm, learning rate, and what was logged if it counts, by step."""
    tracked: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Values of each tracked object, by completed steps."""
    variables: dict[int, dict[str, tuple[str, str, dict[str, Any]]]] = field(default_factory=dict)
    """File, kind and values of each variable, when a newcomer enters."""
    step_s: float = 0.0
    steps_per_epoch: int | None = None
    most_workers: int | None = None
    """Among how many its data can be divided."""
    failed: dict[str, Any] | None = None


def verdict(trials: Mapping[str, Trial], directory: Path) -> dict[str, Any]:
    """What is said of the trials."""
    whole, again = trials[UNDISTURBED], trials.get(REPEATED)
    entered_after = whole.entered_after
    findings: dict[str, Any] = {
        "steps": len(whole.losses),
        "losses": [loss.get("loss") for loss in whole.losses.values()],
        "tracked": sorted(whole.tracked[max(whole.tracked)]) if whole.tracked else [],
        "step_s": whole.step_s,
        "most_workers": whole.most_workers,
        "is_whole": True,
        "differences": [],
        "untracked": [],
        "suspects": [],
        "remarks": [],
    }
    if NEWCOMER not in trials:
        findings["remarks"].append(
            f"the loop has ended after {len(whole.losses)} steps, and it takes {entered_after + 1} to interrupt it: "
            "what it tracks was not compared"
        )
        return findings
    if again is not None and (first := _first_difference(whole, again, ())) is not None:
        findings["is_whole"] = False
        findings["differences"].append({"trial": "two undisturbed runs from the beginning", **first})
        findings["remarks"].append(
            "the loop is not the same twice, so what it does not track cannot be found. Usual causes: random numbers "
            "that are drawn without a seed, the time, the order of a set or of files"
        )
        return findings
    noise = _changed(whole, again) if again is not None else {}
    noisy = [trials[name] for name in NOISY if name in trials]
    untracked: dict[str, dict[str, Any]] = {}
    for name in (NEWCOMER, SURVIVOR, SPLIT, _OTHER_RANK):
        if (trial := trials.get(name)) is None:
            continue
        sentence = _WHAT[name].format(entered_after)
        is_split = name in (SPLIT, _OTHER_RANK)
        first = _first_difference(whole, trial, noisy if is_split else ())
        if first is not None and not any(known["trial"] == sentence for known in findings["differences"]):
            findings["differences"].append({"trial": sentence, **first})
        for variable, change in ({} if is_split else _changed(whole, trial)).items():
            if variable not in noise:
                untracked.setdefault(variable, {**change, "trial": sentence})
    has_differences = any(found["trial"] != WITH_TWO for found in findings["differences"])
    states = {name: reason for name, reason in untracked.items() if reason["kind"] == "state"}
    findings["untracked"] = [*states.values()]
    if has_differences:
        findings["untracked"] += [reason for reason in untracked.values() if reason["kind"] != "state"]
    findings["is_whole"] = not findings["differences"] and not states
    if has_differences:
        findings["suspects"] = list(_iterators(whole, directory))
    elif plain := [f"{reason['name']} ({reason['place']})" for name, reason in untracked.items() if name not in states]:
        findings["remarks"].append(
            f"not tracked, and begin anew when the function is called again, without a change of the training: "
            f"{', '.join(plain)}"
        )
    return findings


def _first_difference(whole: Trial, trial: Trial, noisy: Sequence[Trial]) -> dict[str, Any] | None:
    """The first step with another loss or tracked state, and what differs there.

    Args:
        noisy: runs that rounding alone makes other ones. What differs less, or as they do, is no difference.
    """
    for step in range(1, whole.entered_after + whole.steps_after + 1):
        before, after = whole.losses.get(step), trial.losses.get(step)
        if before is not None and after is not None:
            for name in before:
                others = [other.losses.get(step, {}) for other in noisy]
                if name in after and (found := difference({name: before[name]}, {name: after[name]}, others=others)):
                    return {"step": step, "what": name, "words": found.words}
        states, later = whole.tracked.get(step, {}), trial.tracked.get(step, {})
        for name in states:
            noises = [other.tracked.get(step, {}).get(name, {}) for other in noisy]
            first = whole.tracked.get(0, {}).get(name, {})
            found = difference(states[name], later[name], first=first, others=noises) if name in later else None
            if found is not None:
                is_entry = step == whole.entered_after and trial.losses.keys() != whole.losses.keys()
                message = f"{found.words}, right after its load_state_dict()" if is_entry else found.words
                return {"step": step, "what": f"{name}.{found.path}".rstrip("."), "words": message}
    return None


def _changed(whole: Trial, trial: Trial) -> dict[str, dict[str, Any]]:
    """Variables that have another value when the function was entered after step 2 than in the undisturbed run."""
    changed: dict[str, dict[str, Any]] = {}
    entered = whole.entered_after
    before, after = whole.variables.get(entered, {}), trial.variables.get(entered, {})
    for name in sorted(before.keys() & after.keys()):
        file, kind, values = before[name]
        mismatch = difference(values, after[name][2])
        if mismatch is None and values.keys() != after[name][2].keys():
            mismatch = Difference("", "has other items")
        if mismatch is not None:
            path = f"{name}.{mismatch.path}" if mismatch.path else name
            place = place_of(name, file)
            changed[name] = {"name": name, "path": path, "place": place, "kind": kind, "words": mismatch.words}
    return changed


def _iterators(whole: Trial, directory: Path) -> Iterator[str]:
    """Iterators whose position is not known to Shoal, and lines that make loaders."""
    seen = set()
    for name, (text, kind, _) in whole.variables.get(whole.entered_after, {}).items():
        if kind == "iterator":
            place = place_of(name, text)
            seen.add(place)
            yield f"{name}, an iterator ({place})"
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_below(file, directory):
            for place in _loader_lines(Path(file)):
                if place not in seen:
                    seen.add(place)
                    yield f"a loader ({place})"


def _loader_lines(file: Path) -> Iterator[str]:
    """Where DataLoaders and iterators are made that are no argument of `run.batches`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    given = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("batches")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in given:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "iter" or name.endswith("DataLoader"):
                yield f"{file.name}:{node.lineno}"
