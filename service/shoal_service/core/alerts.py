"""Alerts: conditions over a job's metrics, of which the job's history tells once when they begin to hold.

    spec.alerts: ["loss > 10", "max(grad_norm) > 100"]      the language of core/where, over METRICS and SERIES only
    job.status.alerts                                       whether each holds, since which step, and its extremes

`follow` is called with the steps of each report, before they are stored. Every step is looked at, so a spike between
two reports is seen. A condition that goes on to hold tells nothing more; one that ceases to hold and begins again tells
again, after PAUSE_S at the earliest: a noisy metric crosses its bound at every other step. Extremes are kept in the
status, so no report reads the curve of the job. Pure: webhooks, mail, chat and pages follow the event.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field as Documented

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events import AlertRaised
from shoal_service.core.where.fields import Field, Source
from shoal_service.core.where.language import (
    AllOf,
    AnyOf,
    Compared,
    Condition,
    InvalidCondition,
    IsSet,
    Not,
    Relation,
    fields_of,
    parse,
)
from shoal_workers.contract import Frozen
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem

PAUSE_S = 600.0
"""Shortest time between two events of one alert, by the time of the steps."""
METRICS = ("step", "loss", "val_loss", "grad_norm", "lr_now", "tokens_per_s", "step_s")
"""The facts that an alert can look at, whose path is the field of a step that has it; also metric.NAME, val.NAME."""
_OF_THE_TASK = ("metrics", "val_metrics")
_RELATIONS: Mapping[Relation, Callable[[Any, Any], bool]] = {
    Relation.EQUAL: operator.eq,
    Relation.LESS: operator.lt,
    Relation.AT_MOST: operator.le,
    Relation.MORE: operator.gt,
    Relation.AT_LEAST: operator.ge,
}


class AlertView(Frozen):
    """An alert of a job, and what is known of it."""

    condition: str
    holds: bool = False
    """After the newest step."""
    step: int | None = None
    """The step at which it began to hold last; null: it never did."""
    at: float | None = None
    told_at: float | None = None
    """When the newest event was written: at most one in 10 minutes."""
    values: dict[str, float] = Documented(default_factory=dict)
    """The newest values of what it names, by name; of max, min and first those since the alert exists."""


def check_alerts(conditions: Sequence[str]) -> None:
    """Raises SpecError: an alert is not a condition over metrics."""
    problems = []
    for number, text in enumerate(conditions):
        try:
            _condition(text)
        except InvalidCondition as error:
            problems.append(SpecProblem(path=f"alerts.{number}", message=str(error)))
    if problems:
        raise SpecError(tuple(problems))


def begin(conditions: Sequence[str], before: Sequence[AlertView] = ()) -> tuple[AlertView, ...]:
    """Make the alerts of a new spec. One that the job had before keeps what is known of it."""
    known = {alert.condition: alert for alert in before}
    return tuple(known.get(text, AlertView(condition=text)) for text in dict.fromkeys(conditions))


def follow(
    alerts: Sequence[AlertView], points: Sequence[SeriesPoint]
) -> tuple[tuple[AlertView, ...], list[AlertRaised]]:
    """Look at new steps, in their order. Return the alerts after them, and the events of those that began to hold."""
    events: list[AlertRaised] = []
    followed = []
    for alert in alerts:
        for point in points:
            alert = _after(alert, point, events)
        followed.append(alert)
    return tuple(followed), events


def refused_step(step: int, at: float) -> SeriesPoint:
    """The step at which a job stopped because its loss or gradient was not finite. It is in no series."""
    nan = math.nan
    return SeriesPoint(
        step=step,
        at=at,
        loss=nan,
        grad_norm=nan,
        lr=nan,
        tokens_per_s=nan,
        step_s=nan,
        world_size=0,
        generation=0,
    )


def _after(alert: AlertView, point: SeriesPoint, events: list[AlertRaised]) -> AlertView:
    condition = _condition(alert.condition)
    values = dict(alert.values)
    for field in fields_of(condition):
        _take(values, field, point)
    holds = _holds(condition, values)
    changes: dict[str, Any] = {"values": values, "holds": holds}
    if holds and not alert.holds:
        changes |= {"step": point.step, "at": point.at}
        if alert.told_at is None or point.at - alert.told_at >= PAUSE_S:
            changes["told_at"] = point.at
            shown = {field.name: values[field.name] for field in fields_of(condition) if field.name in values}
            events.append(AlertRaised(condition=alert.condition, step=point.step, values=shown))
    return alert.model_copy(update=changes)


def _take(values: dict[str, float], field: Field, point: SeriesPoint) -> None:
    """Write the value of the field after this step. A step without a finite value leaves it as it was, except `first`,
    which is the first such step after a finite value."""
    name, value = field.name, _value(field, point)
    if value is None:
        return
    function, column = field.path if field.source is Source.SERIES else ("", "")
    seen = f"last({column})"
    if function == "first" and not math.isfinite(value):
        if seen in values:
            values.setdefault(name, point.step)
    elif function == "first":
        values[seen] = value
    elif math.isfinite(value):
        extreme = {"max": max, "min": min}.get(function)
        values[name] = value if extreme is None else extreme(value, values.get(name, value))


def _value(field: Field, point: SeriesPoint) -> float | None:
    """The value of one step; NaN if it is not finite, None if the step has none, such as of a validation."""
    if field.source is not Source.SERIES and field.path[0] in _OF_THE_TASK:
        metrics: dict[str, float] = getattr(point, field.path[0])
        return metrics.get(field.path[1])
    value: float | None = getattr(point, field.path[-1])
    return value


def _holds(condition: Condition, values: Mapping[str, float]) -> bool:
    """As the store answers it in SQL: what has no value matches `== null` only."""
    match condition:
        case Compared(field, relation, literal):
            value = values.get(field.name)
            if literal is None or value is None:
                return literal is None and value is None
            return _RELATIONS[relation](value, literal)
        case IsSet(field):
            return field.name in values
        case Not(part):
            return not _holds(part, values)
        case AllOf(parts):
            return all(_holds(part, values) for part in parts)
        case AnyOf(parts):
            return any(_holds(part, values) for part in parts)


@lru_cache(maxsize=1024)
def _condition(text: str) -> Condition:
    """Raises InvalidCondition."""
    condition = parse(text, now=0.0)
    if condition is None:
        raise InvalidCondition(text, 0, 1, "an alert is a condition, such as loss > 10")
    for field in _strange(condition):
        names = ", ".join(METRICS)
        message = f"an alert looks at {names}, metric.NAME, val.NAME, and max, min and first; not at {field.name}"
        raise InvalidCondition(text, max(0, text.find(field.name)), len(field.name), message)
    return condition


def _strange(condition: Condition) -> Iterator[Field]:
    """Yield the fields that no step has."""
    for field in fields_of(condition):
        is_metric = field.source is Source.STATUS and (field.path[0] in _OF_THE_TASK or field.name in METRICS)
        if field.source is not Source.SERIES and not is_metric:
            yield field
