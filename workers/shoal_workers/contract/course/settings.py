"""TrainingSettings: what of a spec a running job may change at a step boundary, without losing a step. Pure data.

PATCH -> spec of the job -> Directive -> attempt machine: the group yields -> Assignment -> engine
"""

from __future__ import annotations

from typing import Any

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.course.training import ScheduleSpec, StopSpec, ValidationSpec
from shoal_workers.contract.spec import JobSpec


class TrainingSettings(Frozen):
    """The values of one generation."""

    stop: StopSpec
    schedule: ScheduleSpec
    validation: ValidationSpec
    lr: float
    """`optimizer.lr`."""


def settings_of(spec: JobSpec) -> TrainingSettings:
    return TrainingSettings(stop=spec.stop, schedule=spec.schedule, validation=spec.validation, lr=spec.optimizer.lr)


def with_settings(spec: JobSpec, settings: TrainingSettings) -> JobSpec:
    """The spec with other values of these keys."""
    return spec.model_copy(
        update={
            "stop": settings.stop,
            "schedule": settings.schedule,
            "validation": settings.validation,
            "optimizer": spec.optimizer.model_copy(update={"lr": settings.lr}),
        }
    )


def changes(before: TrainingSettings, after: TrainingSettings) -> tuple[str, ...]:
    """For people: one text per value that differs, `stop.steps 120 -> 200`."""
    old, new = _flat(before), _flat(after)
    return tuple(
        f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def _flat(settings: TrainingSettings) -> dict[str, Any]:
    document = settings.model_dump(mode="json")
    values = {"optimizer.lr": document.pop("lr")}
    for section, keys in document.items():
        values |= {f"{section}.{key}": value for key, value in keys.items()}
    return values


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
