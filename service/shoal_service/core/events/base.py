"""JobEvent: the base class of every entry of a job's history, and the severities."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import ConfigDict

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
    """One entry of a job's history. A subclass is one event type.

    The docstring of the subclass says when the event happens, and the docstrings of its fields explain them:
    docs/reference/events.md is made of both. On the wire, `data` holds the fields that the emitter has set. A field
    whose name is a Python keyword has a trailing underscore here and none on the wire (`from_`).
    """

    model_config = ConfigDict(alias_generator=lambda name: name.removesuffix("_"), populate_by_name=True)

    type: ClassVar[str]
    """Dotted name of the event type on the wire."""
    severity: ClassVar[Severity]
    is_routine: ClassVar[bool] = False
    """True if an undisturbed job has it again and again. Old ones are deleted while the job trains."""

    def words(self) -> str:
        """One line for people."""
        raise NotImplementedError

    def severity_of_this(self) -> Severity:
        """The severity of this event. For a few types it depends on the data, and may differ from `severity`."""
        return self.severity

    def data(self) -> dict[str, Any]:
        """The fields as they are stored and sent: JSON values."""
        return self.model_dump(mode="json", by_alias=True, include=self.model_fields_set)
