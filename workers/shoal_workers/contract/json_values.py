"""Checks that a decoded document contains only values that every database, log and message can hold.

Called before anything else reads the document. YAML and Python's JSON reader accept values that PostgreSQL, a JSON file
or a path cannot hold: NaN, null characters, lone surrogates, dates, integers of a million digits, anchors that contain
themselves. It does not recurse, and never raises.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from shoal_workers.contract.rules import SpecProblem

MAX_DEPTH = 32
MAX_VALUES = 200_000
_MAX_INT = 2**63
_SHOWN_CHARS = 80
Link = tuple["Link | None", str | int]
"""Position of a value in the document: the position of its parent, and its key or index there. Only the path of a fault
is written out, because the paths of all values together may be a million times as long as the document."""


YAML_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0b[0-1_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)\Z"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""YAML tag -> pattern of the numbers of this type in a spec. Unlike in YAML 1.1, 12:30 is text and 3e-4 is a
number."""


def json_faults(document: Any) -> Iterator[SpecProblem]:
    """Yield every value that cannot be stored. Stops at MAX_DEPTH and at MAX_VALUES."""
    stack: list[tuple[Link | None, int, Any]] = [(None, 0, document)]
    num_values = 0
    while stack:
        link, depth, value = stack.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            yield SpecProblem(path="", message=f"the document has more than {MAX_VALUES:,} values.")
            return
        if depth > MAX_DEPTH:  # ends also the walk through a value that contains itself
            yield SpecProblem(path=path_of(link), message=f"nested deeper than {MAX_DEPTH} levels.")
            return
        fault = _fault(value)
        if fault:
            yield SpecProblem(path=path_of(link), message=fault)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str) or _fault(key):
                    yield SpecProblem(path=path_of(link), message=f"a key must be plain text; one is {shown(key)}.")
                else:
                    stack.append(((link, key), depth + 1, inner))
        elif isinstance(value, list | tuple):
            stack.extend(((link, number), depth + 1, v) for number, v in enumerate(value))


def path_of(link: Link | None) -> str:
    """Return the dotted path of a position, shortened for messages."""
    parts: list[str] = []
    while link is not None:
        link, part = link
        parts.append(shown_path(str(part)))
    return shown_path(".".join(reversed(parts)))


def shown(value: Any) -> str:
    """A value as a message shows it, shortened."""
    try:
        text = _REPR.repr(value)
    except (ValueError, RecursionError):  # for example an integer of more than 4,300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def shown_path(path: str) -> str:
    return path if len(path) <= 200 else path[:197] + "..."


def _fault(value: Any) -> str | None:
    match value:
        case None | bool() | dict() | list() | tuple():
            return None
        case str():
            if "\0" in value:
                return f"the text {shown(value)} contains a null character."
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                return f"the text {shown(value)} is not valid Unicode (it contains half of a surrogate pair)."
            return None
        case int():
            return None if -_MAX_INT <= value < _MAX_INT else "the number does not fit into 64 bits."
        case float():
            return None if math.isfinite(value) else f"{value} is not a finite number."
        case _:
            kind = type(value).__name__
            return f"{shown(value)} is a {kind}; a spec holds text, numbers, booleans, null, lists and objects."


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _SHOWN_CHARS
