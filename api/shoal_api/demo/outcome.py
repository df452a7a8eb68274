"""The measured results of the demo, and the checks that they must pass. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.training import GenerationFormed
from shoal_service.core.quantities import count_text
from shoal_service.views import EventView, IncidentView
from shoal_workers.contract.job import JobState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The losses of two runs, compared step by step."""

    num_steps: int
    """Steps that both runs have."""
    missing: tuple[int, ...]
    """Steps that only one of the runs has."""
    max_abs_diff: float | None
    """None if the runs have no step in common or a loss is not finite."""
    worst_step: int | None


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
    comparison: LossComparison
    val_bits_per_byte: float | None
    tokens_per_s: float | None

    def document(self) -> dict[str, Any]:
        return {
            "state": str(self.state),
            "steps": self.steps,
            "world_sizes": list(self.world_sizes),
            "layouts": list(self.layouts),
            "surviving_pids": list(self.survivors),
            "incidents": [_incident(incident) for incident in self.incidents],
            "max_abs_loss_diff": self.comparison.max_abs_diff,
            "val_bits_per_byte": self.val_bits_per_byte,
            "tokens_per_s": self.tokens_per_s,
        }


def failed_checks(
    outcome: DemoOutcome, *, workers: int, tolerance: float, layouts: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return one message per failed check; empty if the demo passed."""
    broken = []
    expected = (workers, workers - 1, workers)
    if outcome.state != JobState.SUCCEEDED:
        broken.append(f"the disturbed job ended as {outcome.state}, not SUCCEEDED")
    if not contains_in_order(outcome.world_sizes, expected):
        broken.append(f"the world sizes were {arrows(outcome.world_sizes)}; expected {arrows(expected)} among them")
    if not contains_in_order(outcome.layouts, layouts):
        broken.append(f"the layouts were {arrows(outcome.layouts)}; expected {arrows(layouts)} among them")
    if len(outcome.survivors) < workers - 1:
        broken.append(
            f"{count_text(len(outcome.survivors), 'worker')} trained before and after the kill; expected {workers - 1}"
        )
    if not outcome.incidents:
        broken.append("no incident was recorded although a worker was killed")
    diff = outcome.comparison.max_abs_diff
    if outcome.comparison.missing:
        steps = ", ".join(str(step) for step in outcome.comparison.missing[:5])
        broken.append(f"only one of the runs has {count_text(len(outcome.comparison.missing), 'step')}: {steps} ...")
    if diff is None:
        broken.append("the losses of the two runs cannot be compared")
    elif not diff <= tolerance:
        broken.append(
            f"the losses differ by {diff:.3g} at step {outcome.comparison.worst_step}; at most {tolerance:g} is allowed"
        )
    return tuple(broken)


def compare_losses(disturbed: Iterable[SeriesPoint], undisturbed: Iterable[SeriesPoint]) -> LossComparison:
    """Return the largest absolute difference of the losses over the steps that both runs have."""
    ours = {point.step: point.loss for point in disturbed}
    theirs = {point.step: point.loss for point in undisturbed}
    common = sorted(ours.keys() & theirs.keys())
    missing = tuple(sorted(ours.keys() ^ theirs.keys()))
    diffs = {step: abs(ours[step] - theirs[step]) for step in common}
    if not diffs or not all(math.isfinite(diff) for diff in diffs.values()):
        return LossComparison(len(common), missing, None, None)
    worst = max(diffs, key=lambda step: (diffs[step], -step))
    return LossComparison(len(common), missing, diffs[worst], worst)


def world_sizes(events: Iterable[EventView]) -> tuple[int, ...]:
    """Return the world sizes over the run, one entry per change."""
    return changes(int(event.data["workers"]) for event in _formed_generations(events))


def layouts(events: Iterable[EventView]) -> tuple[str, ...]:
    """Return the parallel layouts over the run, one entry per change."""
    return changes(str(event.data["layout"]) for event in _formed_generations(events) if event.data.get("layout"))


def changes(values: Iterable[T]) -> tuple[T, ...]:
    """Return the values without those that equal the one before."""
    return tuple(value for value, _ in itertools.groupby(values))


def _formed_generations(events: Iterable[EventView]) -> list[EventView]:
    return sorted((event for event in events if event.type == GenerationFormed.type), key=lambda event: event.seq)


def with_detection(incidents: Iterable[IncidentView], killed_at: float | None) -> tuple[IncidentView, ...]:
    """Set the time to detect of the first incident. Only the demo knows when it sent the signal."""
    known = tuple(incidents)
    if killed_at is None or not known or known[0].detect_s is not None:
        return known
    return (known[0].model_copy(update={"detect_s": max(0.0, known[0].at - killed_at)}), *known[1:])


def contains_in_order(seen: Sequence[object], expected: Sequence[object]) -> bool:
    """Return True if `expected` is a subsequence of `seen`."""
    rest = iter(seen)
    return all(value in rest for value in expected)


def mean_tokens_per_s(series: Sequence[SeriesPoint], tokens_per_step: int) -> float | None:
    """Return the throughput between the ends of the first and of the last step, recoveries included."""
    ordered = sorted(series, key=lambda point: point.step)
    if len(ordered) < 2 or ordered[-1].at <= ordered[0].at:
        return None
    return tokens_per_step * (ordered[-1].step - ordered[0].step) / (ordered[-1].at - ordered[0].at)


def tokens_per_step(spec: Mapping[str, Any]) -> int:
    return int(spec["batch"]["global_size"]) * int(spec["model"]["seq_len"])


def arrows(values: Iterable[object]) -> str:
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
