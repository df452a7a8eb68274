"""The names of the language: what a job has under each, where it is stored, and what it can be compared with.

    state, loss, created ...          facts of the job: `FACTS`
    metric.NAME, val.NAME             the task's own metrics in the newest step, and in the newest validation
    label.NAME, annotation.NAME       labels and annotations
    max(loss), min(val_loss) ...      the largest and the smallest value over all steps of a column of `SERIES`
    first(step where loss is nan)     the first step after a finite one whose value is not finite; also a step at which
                                      the job stopped because its loss or gradient norm was not finite
    optimizer.lr, model.dim ...       any setting of the spec, by its path; the last key alone for the shortest path
                                      that ends so, if there is only one such

`field_named` finds a name, and refuses others with the names that are near. `value_of` reads a field from the documents
of a job; the store reads the same in SQL. Called by `language`, the store, and the lists of the API.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from shoal_service.core.key_paths import read
from shoal_workers.contract import JobSpec
from shoal_workers.contract.base import FieldError


class Source(StrEnum):
    """Where a value is stored."""

    COLUMN = "column"
    ARCHIVED = "archived"
    QUEUE = "queue"
    STATUS = "status"
    SETTING = "setting"
    LABEL = "label"
    SERIES = "series"


class Kind(StrEnum):
    """What a value can be compared with."""

    TEXT = "text"
    STATE = "state"
    NUMBER = "number"
    TIME = "time"
    SWITCH = "switch"
    LABEL = "label"
    """Text, which compares as a number with numbers if it reads as one."""
    ANY = "any"
    """What the document has: text, a number, true or false."""


@dataclass(frozen=True, slots=True)
class Field:
    """A name, and where a job has its value."""

    name: str
    source: Source
    path: tuple[str, ...]
    """Name of the column, path of keys in the document, name of the label, or function and column of the series."""
    kind: Kind
    meaning: str = ""
    default: int | None = None
    """The value of a job whose document has none: status documents leave out what is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDocuments:
    """What the store has about a job."""

    columns: Mapping[str, Any]
    status: Mapping[str, Any]
    spec: Mapping[str, Any]
    labels: Mapping[str, str]
    queue_position: int | None = None
    archived: bool = field(default=False)


@dataclass(eq=False)
class UnknownName(FieldError, ValueError, text="{message}"):
    """No field has the name, or several do."""

    name: str
    message: str


_COLUMNS: tuple[tuple[str, str, Kind, str], ...] = (
    ("id", "id", Kind.TEXT, "Id of the job."),
    ("name", "name", Kind.TEXT, "Its name."),
    ("state", "state", Kind.STATE, "Its state, such as RUNNING."),
    ("project", "project", Kind.TEXT, "Its project."),
    ("user", "user", Kind.TEXT, "Its user."),
    ("owner", "user", Kind.TEXT, "The same as `user`."),
    ("cluster", "cluster", Kind.TEXT, "Cluster in which its newest attempt has begun."),
    ("priority", "priority", Kind.NUMBER, "Its priority."),
    ("attempt", "attempt", Kind.NUMBER, "Number of its newest attempt."),
    ("granted", "granted_workers", Kind.NUMBER, "Workers that the scheduler has granted."),
    ("created", "created_at", Kind.TIME, "When it was submitted."),
    ("updated", "updated_at", Kind.TIME, "When something about it changed last."),
    ("started", "started_at", Kind.TIME, "When it first got workers."),
    ("ended", "ended_at", Kind.TIME, "When it ended; not set before."),
)
_STATUS: tuple[tuple[str, tuple[str, ...], Kind, str], ...] = (
    ("step", ("step",), Kind.NUMBER, "Completed steps."),
    ("total_steps", ("total_steps",), Kind.NUMBER, "Steps that it is to complete."),
    ("loss", ("loss",), Kind.NUMBER, "Loss of the newest step."),
    ("val_loss", ("val_loss",), Kind.NUMBER, "Loss of the newest validation."),
    ("grad_norm", ("grad_norm",), Kind.NUMBER, "L2 norm of the newest gradient."),
    ("lr_now", ("lr",), Kind.NUMBER, "Learning rate of the newest step; `optimizer.lr` is the setting."),
    ("tokens", ("tokens",), Kind.NUMBER, "Tokens, or samples, of all completed steps."),
    ("tokens_per_s", ("tokens_per_s",), Kind.NUMBER, "Tokens, or samples, per second."),
    ("step_s", ("step_s",), Kind.NUMBER, "Seconds of a step."),
    ("eta_s", ("eta_s",), Kind.NUMBER, "Seconds until it is done."),
    ("workers", ("workers",), Kind.NUMBER, "Workers of its group now."),
    ("goodput", ("goodput", "ratio"), Kind.NUMBER, "Share of its worker-seconds that was productive, 0 to 1."),
    ("incidents", ("incidents",), Kind.NUMBER, "Incidents so far."),
    ("steps_lost", ("steps_lost",), Kind.NUMBER, "Steps that incidents have cost."),
    ("checkpoint_step", ("checkpoint_step",), Kind.NUMBER, "Step of the newest committed checkpoint."),
    ("parameters", ("num_parameters",), Kind.NUMBER, "Number of parameters of the model."),
    ("layout", ("layout",), Kind.TEXT, "Its parallel layout."),
    ("reason", ("reason",), Kind.TEXT, "Why it ended, or what it waits for; for programs."),
    ("message", ("message",), Kind.TEXT, "The same in words."),
)
_ZERO_AT_FIRST = frozenset({"step", "tokens", "workers", "incidents", "steps_lost"})
FACTS: Mapping[str, Field] = {
    **{name: Field(name, Source.COLUMN, (column,), kind, meaning) for name, column, kind, meaning in _COLUMNS},
    **{
        name: Field(name, Source.STATUS, path, kind, meaning, 0 if name in _ZERO_AT_FIRST else None)
        for name, path, kind, meaning in _STATUS
    },
    "queue": Field("queue", Source.QUEUE, (), Kind.NUMBER, "Its place in the queue; 1 starts next."),
    "archived": Field("archived", Source.ARCHIVED, (), Kind.SWITCH, "Whether it is archived."),
}
"""The facts of a job by name."""
_FAMILIES: Mapping[str, tuple[Source, tuple[str, ...], Kind]] = {
    "metric": (Source.STATUS, ("metrics",), Kind.NUMBER),
    "val": (Source.STATUS, ("val_metrics",), Kind.NUMBER),
    "label": (Source.LABEL, (), Kind.LABEL),
    "annotation": (Source.SETTING, ("annotations",), Kind.TEXT),
}
"""First part of a name whose other parts the user has chosen."""
SERIES = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size")
"""Columns of the series that max, min and first read."""
_TIMES = {("finish_by",)}
_MOST_SHOWN = 5


def field_named(parts: tuple[str, ...]) -> Field:
    """Finds the field with this name, given in its parts. Raises UnknownName."""
    name = ".".join(parts)
    if len(parts) == 1 and name in FACTS:
        return FACTS[name]
    if len(parts) > 1 and parts[0] in _FAMILIES:
        source, above, kind = _FAMILIES[parts[0]]
        return Field(name, source, (*above, ".".join(parts[1:])), kind)
    settings = setting_kinds()
    if parts in settings:
        return Field(name, Source.SETTING, parts, settings[parts])
    if any(parts[:depth] in free_settings() for depth in range(1, len(parts))):
        return Field(name, Source.SETTING, parts, Kind.ANY)
    ends = [path for path in settings if len(parts) == 1 and path[-1] == name]
    if ends:
        least = min(map(len, ends))
        shortest, *others = (path for path in ends if len(path) == least)
        if not others:
            return Field(name, Source.SETTING, shortest, settings[shortest])
        paths = " or ".join(".".join(path) for path in ends)
        raise UnknownName(name, f"{name} is the name of several settings: write {paths}")
    raise UnknownName(name, f"there is no {name!r}{_near(name)}")


def series_field(name: str, function: str, column: str) -> Field:
    """Return the field for a function over all steps. Raises UnknownName if the series has no such column."""
    if column not in SERIES:
        raise UnknownName(name, f"{function} reads {', '.join(SERIES)}, not {column!r}")
    return Field(name, Source.SERIES, (function, column), Kind.NUMBER)


def all_names() -> tuple[str, ...]:
    """The names that every job may have: facts, then paths of settings."""
    return (*FACTS, *(".".join(path) for path in setting_kinds()))


def value_of(field: Field, job: JobDocuments) -> Any:
    """The value of a job; None if it has none."""
    match field.source:
        case Source.COLUMN:
            return None if job.columns[field.path[0]] == "" else job.columns[field.path[0]]
        case Source.SERIES:
            return job.columns[field.name]
        case Source.ARCHIVED:
            return job.archived
        case Source.QUEUE:
            return job.queue_position
        case Source.LABEL:
            return job.labels.get(field.path[0])
        case Source.STATUS:
            return read(job.status, field.path, field.default)
        case Source.SETTING:
            return read(job.spec, field.path)


def _near(name: str) -> str:
    known = [*all_names(), *{path[-1] for path in setting_kinds()}]
    similar = difflib.get_close_matches(name, known, n=_MOST_SHOWN, cutoff=0.6)
    if similar:
        return f"; near it are {', '.join(similar)}"
    families = ", ".join(f"{family}.NAME" for family in _FAMILIES)
    return f". Names are {', '.join(FACTS)}; {families}; and settings of the spec, such as optimizer.lr"


@cache
def setting_kinds() -> Mapping[tuple[str, ...], Kind]:
    """Every path of the spec that a value can stand at -> its kind."""
    return dict(_paths(JobSpec, ()))


@cache
def free_settings() -> frozenset[tuple[str, ...]]:
    """Paths below which the user chooses the keys."""
    return frozenset({("model",), ("data",), *(path for path, kind in setting_kinds().items() if kind is Kind.ANY)})


def _paths(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Kind]]:
    for name, known in model.model_fields.items():
        path = (*above, known.alias or name)
        if path in (("labels",), ("annotations",)):
            continue  # they have families of their own
        options = list(_options(known.annotation))
        sections = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        for section in sections:
            yield from _paths(section, path)
        if len(sections) < len(options):
            yield (
                path,
                Kind.TIME if path in _TIMES else _kind_of([option for option in options if option not in sections]),
            )


def _options(annotation: Any) -> Iterator[Any]:
    """The types that the annotation allows, without None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for arg in get_args(annotation):
            yield from _options(arg)
    elif origin is Literal:
        yield from {type(arg) for arg in get_args(annotation)}
    elif annotation is not type(None):
        yield annotation


def _kind_of(options: list[Any]) -> Kind:
    kinds: set[Kind] = set()
    for option in options:
        of_type = [kind for base, kind in _KINDS if isinstance(option, type) and issubclass(option, base)]
        kinds.add(of_type[0] if of_type else Kind.ANY)
    return kinds.pop() if len(kinds) == 1 else Kind.ANY


_KINDS = ((bool, Kind.SWITCH), (int, Kind.NUMBER), (float, Kind.NUMBER), (str, Kind.TEXT))
