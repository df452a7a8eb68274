"""The part of a spec that a running job may change at a step boundary, without losing a step, and how it is changed.

PATCH -> spec of the job -> Directive -> attempt machine: the group yields -> Assignment -> engine

The attempt machine compares the settings of a generation with those of the job's spec; the store plans new weights of a
mixture. Pure.
"""

from __future__ import annotations

from typing import Any

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.mixture_weights import WeightChange
from shoal_workers.contract.schedules import ScheduleSpec
from shoal_workers.contract.spec import JobSpec, StopSpec, ValidationSpec
from shoal_workers.contract.text_data import TEXT_TASKS


class TrainingSettings(Frozen):
    """The settings that a running job may change. A generation trains with one value of them."""

    stop: StopSpec | None
    """None if a loop or a script decides."""
    schedule: ScheduleSpec
    validation: ValidationSpec
    lr: float
    """`optimizer.lr`."""
    weight_changes: tuple[WeightChange, ...] = ()
    """`data.changes` of the built-in tasks."""


def settings_of(spec: JobSpec) -> TrainingSettings:
    return TrainingSettings(
        stop=spec.stop,
        schedule=spec.schedule,
        validation=spec.validation,
        lr=spec.optimizer.lr,
        weight_changes=weight_changes_of(spec),
    )


def weight_changes_of(spec: JobSpec) -> tuple[WeightChange, ...]:
    """`data.changes` of a built-in task that reads text; none for others, whose `data` has the form that they like."""
    requested = spec.data.get("changes", ()) if spec.program is None and spec.task in TEXT_TASKS else ()
    return tuple(WeightChange.model_validate(change) for change in requested)


def with_settings(spec: JobSpec, settings: TrainingSettings) -> JobSpec:
    """Return the spec with these settings instead of its own."""
    return spec.model_copy(
        update={
            "stop": settings.stop,
            "schedule": settings.schedule,
            "validation": settings.validation,
            "optimizer": spec.optimizer.model_copy(update={"lr": settings.lr}),
            "data": _with_weight_changes(spec, settings.weight_changes),
        }
    )


def _with_weight_changes(spec: JobSpec, changes: tuple[WeightChange, ...]) -> dict[str, Any]:
    if changes == weight_changes_of(spec):
        return spec.data
    return {**spec.data, "changes": [change.model_dump(mode="json") for change in changes]}


def changes(before: TrainingSettings, after: TrainingSettings) -> tuple[str, ...]:
    """One text for people per value that differs, for example `stop.steps 120 -> 200`."""
    old, new = _flat(before), _flat(after)
    return tuple(
        f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def _flat(settings: TrainingSettings) -> dict[str, Any]:
    document = settings.model_dump(mode="json")
    values = {"optimizer.lr": document.pop("lr")}
    for change in document.pop("weight_changes"):
        weights = ", ".join(f"{name} {weight:g}" for name, weight in change["weights"].items())
        values[f"data.weights from step {change['at_step']} on"] = weights
    for section, keys in document.items():
        values |= {f"{section}.{key}": value for key, value in (keys or {}).items()}
    return values


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
