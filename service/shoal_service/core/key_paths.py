"""Reads and sets values in a document by paths of keys, as `--set` and the grid of a sweep name them. Pure.

The command line and `sweeps` refuse the same paths in the same words, since both call this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_workers.contract.base import FieldError


@dataclass(eq=False)
class NotASection(FieldError, ValueError, text="{path}: {part} is {value!r}, not a section with keys"):
    """A part of the path is a value without keys."""

    path: str
    part: str
    value: object


def read(document: Any, path: Iterable[str], default: Any = None) -> Any:
    """Return the value at the path; `default` if the document has no such key."""
    for key in path:
        if not isinstance(document, Mapping) or key not in document:
            return default
        document = document[key]
    return document


def assign(document: dict[str, Any], path: str, value: Any) -> None:
    """Changes `document`; sections that are missing are created. Raises NotASection."""
    keys = path.split(".")
    here = document
    for depth, key in enumerate(keys[:-1]):
        section = here.setdefault(key, {})
        if not isinstance(section, dict):
            raise NotASection(path, ".".join(keys[: depth + 1]), section)
        here = section
    here[keys[-1]] = value
