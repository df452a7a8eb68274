"""The catalogue: every event type by name, and how a stored event is read again.

An event type is declared in exactly one place, its class in one of the topic modules. The emitters, REST, Server-Sent
Events, the command line, the page and docs/reference/events.md all take it from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from shoal_service.core.events import job, service, training, workers
from shoal_service.core.events.base import JobEvent, Severity


def _declared_in(topic: ModuleType) -> tuple[type[JobEvent], ...]:
    """The events of a module, in the order of the file."""
    declared = (value for value in vars(topic).values() if isinstance(value, type) and issubclass(value, JobEvent))
    return tuple(event for event in declared if event.__module__ == topic.__name__)


TOPICS: dict[str, tuple[type[JobEvent], ...]] = {
    "The job": _declared_in(job),
    "Workers and incidents": _declared_in(workers),
    "Training and checkpoints": _declared_in(training),
    "The service and the nodes": _declared_in(service),
}
CATALOGUE: dict[str, type[JobEvent]] = {event.type: event for events in TOPICS.values() for event in events}
ROUTINE = frozenset(event.type for event in CATALOGUE.values() if event.is_routine)
"""Types of which old events of a running job are deleted."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a person is shown of an event."""

    severity: Severity
    message: str
    """One line of text, without control characters."""


def describe(type_: str, data: Mapping[str, Any]) -> Description:
    """The description of a stored event. An event that another version of Shoal has stored is always shown: if its type
    is unknown, or its data do not fit, the line is the type and the data."""
    event = read(type_, data)
    if event is not None:
        return Description(event.severity_of_this(), one_line(event.words()))
    known = CATALOGUE.get(type_)
    pairs = " ".join(f"{key}={value}" for key, value in data.items())
    return Description(known.severity if known is not None else Severity.INFO, one_line(f"{type_} {pairs}"))


def read(type_: str, data: Mapping[str, Any]) -> JobEvent | None:
    """The typed event, without fields that this version does not know; None if the type is unknown, or the data do not
    fit."""
    known = CATALOGUE.get(type_)
    if known is None:
        return None
    names = {name.removesuffix("_") for name in known.model_fields}
    try:
        return known.model_validate({key: value for key, value in data.items() if key in names})
    except ValidationError:
        return None


def one_line(text: str) -> str:
    """`text` as one line without control characters: messages come from users' code and are printed on terminals."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
