"""Conditions and orders over jobs in plain Python, value by value: what SQL must answer too. And random ones."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from shoal_service.core.where.fields import Field, JobDocuments, Kind, value_of
from shoal_service.core.where.language import (
    LABEL_NUMBER,
    AllOf,
    AnyOf,
    Compared,
    Condition,
    IsSet,
    Not,
    Order,
    Relation,
)

_FOLDED = str.maketrans(ascii_uppercase, ascii_lowercase)
_RELATIONS: Mapping[Relation, Callable[[Any, Any], bool]] = {
    Relation.EQUAL: operator.eq,
    Relation.LESS: operator.lt,
    Relation.AT_MOST: operator.le,
    Relation.MORE: operator.gt,
    Relation.AT_LEAST: operator.ge,
    Relation.CONTAINS: lambda value, part: part.translate(_FOLDED) in value.translate(_FOLDED),
}


def matches(condition: Condition, job: JobDocuments) -> bool:
    match condition:
        case Compared(field, relation, literal):
            value = value_of(field, job)
            if literal is None:
                return value is None
            typed = _as(type(literal), field, value)
            return typed is not None and _RELATIONS[relation](typed, literal)
        case IsSet(field):
            return value_of(field, job) not in (None, False) or _is_number(value_of(field, job))
        case Not(part):
            return not matches(part, job)
        case AllOf(parts):
            return all(matches(part, job) for part in parts)
        case AnyOf(parts):
            return any(matches(part, job) for part in parts)


def sort(jobs: Sequence[JobDocuments], orders: Sequence[Order]) -> list[JobDocuments]:
    """The newest first among equals; those without a value last."""
    ordered = sorted(jobs, key=lambda job: -job.columns["num"])
    for order in reversed(orders):
        for kind in (bool, str, float):
            known = [job for job in ordered if _as(kind, order.field, value_of(order.field, job)) is not None]
            others = [job for job in ordered if job not in known]
            known.sort(
                key=lambda job, kind=kind, order=order: _as(kind, order.field, value_of(order.field, job)),
                reverse=order.descending,
            )
            ordered = known + others
    return ordered


def label_number(text: str) -> float | None:
    """Return the number that a label reads as; None if it is none."""
    return float(text) if re.search(LABEL_NUMBER, text) else None


def _as(kind: type, field: Field, value: Any) -> Any:
    if kind is float and field.kind is Kind.LABEL:
        return None if value is None else label_number(value)
    if kind is float:
        return float(value) if _is_number(value) else None
    return value if isinstance(value, kind) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


NUMBERS = ("0", "1", "3", "-2", "0.1", "3e-4", "1e-3", "100", "7d")
TEXTS = ('""', '"a"', '"B"', '"speech"', '"SPEECH"', '"é"', '"%"', '"_"', '"1e-3"', '"auto"', '"fish-1"')
NAMES = {
    Kind.NUMBER: (
        *("loss", "val_loss", "step", "incidents", "goodput", "priority", "lr", "tokens", "queue", "sweep.limit"),
        *("metric.accuracy", 'metric."eval acc"', "val.accuracy", "stop.steps", "validation.patience", "attempt"),
    ),
    Kind.TIME: ("created", "started", "ended", "finish_by"),
    Kind.TEXT: ("name", "project", "user", "cluster", "reason", "layout", "precision", "parallelism", "annotation.why"),
    Kind.LABEL: ("label.team", "label.lr", "label.draft"),
    Kind.ANY: ("model.dim", "model.tied", "model.act", "model.inner.depth", "data.corpus", "optimizer.fused"),
    Kind.SWITCH: ("archived", "deterministic", "compile"),
    Kind.STATE: ("state",),
}


def random_condition(draw: Random, depth: int = 3) -> str:
    """The text of a condition. Most of its values are such that some jobs match and others do not."""
    if depth and draw.random() < 0.5:
        parts = [random_condition(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        joined = draw.choice((" and ", " or ")).join(parts)
        return f"not ({joined})" if draw.random() < 0.3 else f"({joined})"
    kind = draw.choice(list(NAMES))
    name = draw.choice(NAMES[kind])
    if draw.random() < 0.15:
        return name
    if draw.random() < 0.15:
        return f"{name} {draw.choice(('==', '!='))} null"
    ordered = ("<", "<=", ">", ">=", "==", "!=")
    match kind:
        case Kind.NUMBER:
            return f"{name} {draw.choice(ordered)} {draw.choice(NUMBERS)}"
        case Kind.TIME:
            return f"{name} {draw.choice(ordered)} {draw.choice(('now', 'now - 5s', 'now - 7d', '2030-01-31'))}"
        case Kind.TEXT:
            return f"{name} {draw.choice((*ordered, '~', '~'))} {draw.choice(TEXTS)}"
        case Kind.SWITCH:
            return f"{name} {draw.choice(('==', '!='))} {draw.choice(('true', 'false'))}"
        case Kind.STATE:
            return f"{name} in ('QUEUED', '{draw.choice(('RUNNING', 'CANCELLED'))}')"
        case _:
            relation = draw.choice((*ordered, "~", "in"))
            if relation == "in":
                return f"{name} in ({draw.choice(TEXTS)}, {draw.choice(NUMBERS)})"
            return f"{name} {relation} {draw.choice(TEXTS if relation == '~' else (*TEXTS, *NUMBERS))}"
