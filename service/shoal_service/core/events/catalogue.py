"""The catalogue: every event type by name, and the reading of stored events.

An event type is declared in exactly one place, its class in one of the topic modules. The emitters, REST, Server-Sent
Events, the command line, the page and docs/reference/events.md read that class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from shoal_service.core.events import job, service, training, workers
from shoal_service.core.events.base import JobEvent, Severity
from shoal_workers.contract import JobState


def _declared_in(topic: ModuleType) -> tuple[type[JobEvent], ...]:
    """Return the events of a module, in the order of the file."""
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
"""Types whose old events are deleted while the job still runs."""


_LOGGED = frozenset(
    event.type
    for event in (
        *(job.JobCreated, job.JobQuarantined, job.JobPreempted),
        *(workers.IncidentOpened, workers.IncidentClosed, service.NodeSuspected),
    )
)
_LOGGED_STATES = frozenset({JobState.QUEUED, JobState.PAUSED, *(state for state in JobState if state.ended)})
_BEGINS = frozenset({JobState.QUEUED, JobState.STARTING})


def is_logged(type_: str, data: Mapping[str, Any]) -> bool:
    """Return True for new jobs, incidents, and the states in which a job begins to train, stops or ends."""
    if type_ != job.JobStateChanged.type:
        return type_ in _LOGGED
    before, to = data.get("from"), data.get("to")
    return to in _LOGGED_STATES or (to == JobState.RUNNING and before in _BEGINS)


@dataclass(frozen=True, slots=True)
class Description:
    """An event as people read it."""

    severity: Severity
    message: str
    """One line of text, without control characters."""


def describe(type_: str, data: Mapping[str, Any]) -> Description:
    """Describe a stored event in one line.

    An event of another version of Shoal is described too: by its type and its data, if the type is unknown here or the
    data do not fit.
    """
    event = read(type_, data)
    if event is not None:
        return Description(event.severity_of_this(), one_line(event.describe()))
    event_class = CATALOGUE.get(type_)
    severity = event_class.severity if event_class is not None else Severity.INFO
    pairs = " ".join(f"{key}={value}" for key, value in data.items())
    return Description(severity, one_line(f"{type_} {pairs}"))


def read(type_: str, data: Mapping[str, Any]) -> JobEvent | None:
    """Return the typed event; None if the type is unknown, or the data do not fit. Unknown fields are ignored."""
    event_class = CATALOGUE.get(type_)
    if event_class is None:
        return None
    names = {name.removesuffix("_") for name in event_class.model_fields}
    try:
        return event_class.model_validate({key: value for key, value in data.items() if key in names})
    except ValidationError:
        return None


def one_line(text: str) -> str:
    """Return `text` as one line without control characters."""
    # messages come from users' code and are printed on terminals
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
