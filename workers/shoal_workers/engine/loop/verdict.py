"""Compares the trials of a loop: what differs, and which untracked variables may be the cause.

Losses and tracked state of all trials have to be equal. If they are not, the cause is looked for among the variables
that had another value when a trial entered the function again than at the same step of the undisturbed trial. Pure,
except that it reads the source files of the program.
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
_TRIAL_SENTENCES = {
    NEWCOMER: "a worker that joins after step {}",
    SURVIVOR: "a worker whose group breaks after step {}",
    SPLIT: WITH_TWO,
    _OTHER_RANK: WITH_TWO,
}


@dataclass
class Trial:
    """Results of a rank of a trial."""

    entered_after: int
    steps_after: int
    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    """Loss, gradient norm, learning rate, and logged metrics if they are compared, by step."""
    tracked: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Values of each tracked object, by completed steps."""
    variables: dict[int, dict[str, tuple[str, str, dict[str, Any]]]] = field(default_factory=dict)
    """File, kind and values of each variable by name, at the step at which a newcomer enters."""
    step_s: float = 0.0
    """Shortest time of a step."""
    steps_per_epoch: int | None = None
    most_workers: int | None = None
    """Workers among which the data can be divided, at most."""
    failed: dict[str, Any] | None = None


def verdict(trials: Mapping[str, Trial], directory: Path) -> dict[str, Any]:
    """Compare the trials with the undisturbed one.

    Args:
        directory: that of the program, whose files are searched for data loaders.

    Returns:
        Findings for `judge` and `shoal check`. `is_whole`: no differences, and no state that is not tracked.
    """
    undisturbed, repeated = trials[UNDISTURBED], trials.get(REPEATED)
    entered_after = undisturbed.entered_after
    findings: dict[str, Any] = {
        "steps": len(undisturbed.losses),
        "losses": [loss.get("loss") for loss in undisturbed.losses.values()],
        "tracked": sorted(undisturbed.tracked[max(undisturbed.tracked)]) if undisturbed.tracked else [],
        "step_s": undisturbed.step_s,
        "most_workers": undisturbed.most_workers,
        "is_whole": True,
        "differences": [],
        "untracked": [],
        "suspects": [],
        "remarks": [],
    }
    if NEWCOMER not in trials:
        findings["remarks"].append(
            f"the loop has ended after {len(undisturbed.losses)} steps, and it takes {entered_after + 1} to interrupt "
            "it: what it tracks was not compared"
        )
        return findings
    if repeated is not None and (first := _first_difference(undisturbed, repeated, ())) is not None:
        findings["is_whole"] = False
        findings["differences"].append({"trial": "two undisturbed runs from the beginning", **first})
        findings["remarks"].append(
            "the loop is not the same twice, so what it does not track cannot be found. Usual causes: random numbers "
            "that are drawn without a seed, the time, the order of a set or of files"
        )
        return findings
    noise = _changed_variables(undisturbed, repeated) if repeated is not None else {}
    noisy = [trials[name] for name in NOISY if name in trials]
    untracked: dict[str, dict[str, Any]] = {}
    for name in (NEWCOMER, SURVIVOR, SPLIT, _OTHER_RANK):
        if (trial := trials.get(name)) is None:
            continue
        sentence = _TRIAL_SENTENCES[name].format(entered_after)
        is_split = name in (SPLIT, _OTHER_RANK)
        first = _first_difference(undisturbed, trial, noisy if is_split else ())
        if first is not None and all(earlier["trial"] != sentence for earlier in findings["differences"]):
            findings["differences"].append({"trial": sentence, **first})
        for variable, change in ({} if is_split else _changed_variables(undisturbed, trial)).items():
            if variable not in noise:
                untracked.setdefault(variable, {**change, "trial": sentence})
    has_differences = any(entry["trial"] != WITH_TWO for entry in findings["differences"])
    states = {name: entry for name, entry in untracked.items() if entry["kind"] == "state"}
    findings["untracked"] = [*states.values()]
    if has_differences:
        findings["untracked"] += [entry for entry in untracked.values() if entry["kind"] != "state"]
    findings["is_whole"] = not findings["differences"] and not states
    if has_differences:
        findings["suspects"] = list(_iterators(undisturbed, directory))
    elif plain := [
        f"{entry['name']} ({entry['place']})"
        for name, entry in untracked.items()
        if name not in states and is_below(entry["file"], directory)  # torch computes attributes anew
    ]:
        findings["remarks"].append(
            f"not tracked, and begin anew when the function is called again, without a change of the training: "
            f"{', '.join(plain)}"
        )
    return findings


def _first_difference(undisturbed: Trial, trial: Trial, noisy: Sequence[Trial]) -> dict[str, Any] | None:
    """Return the first step with another loss or tracked state, and what differs there; None if all is equal.

    Args:
        noisy: noisy trials. What differs from the undisturbed one no more than these do is no difference.
    """
    for step in range(1, undisturbed.entered_after + undisturbed.steps_after + 1):
        before, after = undisturbed.losses.get(step), trial.losses.get(step)
        if before is not None and after is not None:
            for name in before:
                others = [other.losses.get(step, {}) for other in noisy]
                if name in after and (mismatch := difference({name: before[name]}, {name: after[name]}, others=others)):
                    return {"step": step, "what": name, "words": mismatch.words}
        states, later = undisturbed.tracked.get(step, {}), trial.tracked.get(step, {})
        for name in states:
            noises = [other.tracked.get(step, {}).get(name, {}) for other in noisy]
            first = undisturbed.tracked.get(0, {}).get(name, {})
            mismatch = difference(states[name], later[name], first=first, others=noises) if name in later else None
            if mismatch is not None:
                is_entry = step == undisturbed.entered_after and trial.losses.keys() != undisturbed.losses.keys()
                message = f"{mismatch.words}, right after its load_state_dict()" if is_entry else mismatch.words
                return {"step": step, "what": f"{name}.{mismatch.path}".rstrip("."), "words": message}
    return None


def _changed_variables(undisturbed: Trial, trial: Trial) -> dict[str, dict[str, Any]]:
    """Return the variables with another value than in the undisturbed trial, where the function was entered again."""
    changed: dict[str, dict[str, Any]] = {}
    entered = undisturbed.entered_after
    before, after = undisturbed.variables.get(entered, {}), trial.variables.get(entered, {})
    for name in sorted(before.keys() & after.keys()):
        file, kind, values = before[name]
        mismatch = difference(values, after[name][2])
        if mismatch is None and values.keys() != after[name][2].keys():
            mismatch = Difference("", "has other items")
        if mismatch is not None:
            path, place = f"{name}.{mismatch.path}".rstrip("."), place_of(name, file)
            words = mismatch.words
            changed[name] = {"name": name, "path": path, "place": place, "file": file, "kind": kind, "words": words}
    return changed


def _iterators(undisturbed: Trial, directory: Path) -> Iterator[str]:
    """Yield iterators whose position Shoal does not know, and lines that make loaders."""
    seen = set()
    for name, (file_name, kind, _) in undisturbed.variables.get(undisturbed.entered_after, {}).items():
        if kind == "iterator":
            place = place_of(name, file_name)
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
    """Yield the lines that make DataLoaders or iterators, except as an argument of `run.batches`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    passed_to_shoal = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("batches")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in passed_to_shoal:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "iter" or name.endswith("DataLoader"):
                yield f"{file.name}:{node.lineno}"
