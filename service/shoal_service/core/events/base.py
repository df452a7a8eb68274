"""JobEvent: the base class of every entry of a job's history, the severities, and how an event's line is filled in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from string import Formatter
from typing import Any, ClassVar

from pydantic import ConfigDict

from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract import Frozen


class Severity(StrEnum):
    """How a reader should take an event; the command line and the page choose a colour by it."""

    INFO = "info"
    SUCCESS = "success"
    """Something was repaired, or is complete."""
    WARNING = "warning"
    """Training goes on, but a person may want to look."""
    ERROR = "error"
    """Something failed, and Shoal reacts to it."""


class JobEvent(Frozen):
    """One entry of a job's history. A subclass is one event type, and says so:

        class JobCreated(JobEvent, type="job.created", severity=Severity.INFO):

    The docstring of the subclass says when the event happens, and the docstrings of its fields explain them:
    docs/reference/events.md is made of both. On the wire, `data` holds the fields that the emitter has set. A field
    whose name is a Python keyword has a trailing underscore here and none on the wire (`from_`).
    """

    model_config = ConfigDict(alias_generator=lambda name: name.removesuffix("_"), populate_by_name=True)

    type: ClassVar[str]
    """Dotted name of the event type on the wire."""
    severity: ClassVar[Severity]
    is_routine: ClassVar[bool]
    """True if an undisturbed job has it again and again. Old ones are deleted while the job trains."""

    text: ClassVar[str]
    """The line for people, as `fill_line` reads it; empty if `describe` makes it."""

    def __init_subclass__(
        cls, *, type: str, severity: Severity, is_routine: bool = False, text: str = "", **others: Any
    ) -> None:
        super().__init_subclass__(**others)
        cls.type, cls.severity, cls.is_routine, cls.text = type, severity, is_routine, text

    def describe(self) -> str:
        """One line for people."""
        return fill_line(self.text, dict(self))

    def severity_of_this(self) -> Severity:
        """The severity of this event. For a few types it depends on the data, and may differ from `severity`."""
        return self.severity

    def data(self) -> dict[str, Any]:
        """The fields as they are stored and sent: JSON values."""
        return self.model_dump(mode="json", by_alias=True, include=self.model_fields_set)


class ByUser(Frozen):
    """Fields of an event that a user has caused. As the classes below, it declares what several types have."""

    by: str | None = None
    """Name of the one who asked through the API."""


class OfGeneration(Frozen):
    generation: int


class OfWorker(Frozen):
    worker_id: str


class OfRank(OfWorker):
    rank: int | None
    """null: it was not in the group."""


class OfNode(Frozen):
    node_id: str


class OfCheckpoint(Frozen):
    name: str
    step: int


class OfCode(Frozen):
    version: str
    """The new version."""
    before: str
    """The version that trained before it."""


class OfProfile(Frozen):
    number: int
    rank: int


def fill_line(text: str, fields: Mapping[str, Any]) -> str:
    """Fill the fields into the line of an event type.

    {reason}  {pause_s:.2f}             as in `str.format`
    {grace_s:duration}                  a form of FORMS
    {workers:count worker}              a form with what it needs: "2 workers"
    [, from step {start_step}]          left out if a field in it is None or empty
    [to checkpoint {to}|to the seed]    the second text if a field in the first is None or empty
    """

    def choose(part: re.Match[str]) -> str:
        first, _, second = part[1].partition("|")
        names = [name for _, name, *_ in _FORMATTER.parse(first) if name]
        return first if all(fields[name] not in (None, "", (), {}) for name in names) else second

    return _FORMATTER.vformat(re.sub(r"\[(.*?)\]", choose, text), (), fields)


FORMS: Mapping[str, Callable[[Any, str], str]] = {
    "count": lambda value, noun: count_text(value if isinstance(value, int) else len(value), noun),
    "duration": lambda seconds, _: duration_text(seconds),
    "list": lambda values, _: ", ".join(map(str, values)),
    "numbers": lambda values, digits: ", ".join(f"{name} {value:{digits}}" for name, value in values.items()),
    "describe": lambda value, _: str(value.describe()),
    "next": lambda step, _: str(step + 1),
    "node": lambda node_id, _: str(node_id[:12]),
    "worker": lambda worker_id, _: f"worker {worker_id.rpartition('/')[2]}",
    "code": lambda version, _: version[:12] or "the code before",
}
"""Forms of a value in a line. A worker is named by its number in the attempt, the last part of its id."""


class _LineFormatter(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        form, _, argument = format_spec.partition(" ")
        return FORMS[form](value, argument) if form in FORMS else str(super().format_field(value, format_spec))


_FORMATTER = _LineFormatter()
