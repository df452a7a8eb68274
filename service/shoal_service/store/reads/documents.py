"""Reads stored JSON documents that today's rules may refuse, with what is wrong with them. Pure; called by `records`.

A document that another release wrote, or that was damaged, yields its readable part: what is refused is left out, and
the rest is read again. A caller that acts on the result must first look at `problem`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Readable(Generic[M]):
    value: M
    problem: str
    """What was refused, one line; empty: nothing was."""


def read(model: type[M], document: str, fallback: M) -> Readable[M]:
    """`fallback`: if nothing of the document can be read."""
    try:
        return Readable(model.model_validate_json(document), "")
    except ValidationError as error:
        problem = _in_one_line(error)
    try:
        raw: Any = json.loads(document)
    except ValueError:
        return Readable(fallback, problem)
    for _ in range(_ROUNDS):
        if not isinstance(raw, dict):
            break
        try:
            return Readable(model.model_validate(raw), problem)
        except ValidationError as error:
            if not all(_left_out(raw, one["loc"]) for one in error.errors()):
                break
    return Readable(fallback, problem)


def _left_out(raw: dict[str, Any], where: tuple[int | str, ...]) -> bool:
    """Removes the innermost key of the path that exists, in place. False: there is none, so a key is missing."""
    place, parents = raw, []
    for step in where:
        if not isinstance(place, dict) or step not in place:
            break  # the tag of a union, or an element of a list: its key goes as a whole
        parents.append((place, step))
        place = place[step]
    if not parents:
        return False
    holder, key = parents[-1]
    del holder[key]
    return True


def _in_one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"])
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}" if where else f"{first['msg']}{more}"
