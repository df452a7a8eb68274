"""Sets values in a document by dotted paths of keys, as `--set` and the grid of a sweep name them. Pure.

The command line and `sweeps` refuse the same paths in the same words, since both call this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_workers.contract.base import FieldError


@dataclass(eq=False)
class NotASection(FieldError, ValueError, text="{path}: {part} is {value!r}, not a section with keys"):
    """A part of the path is a value without keys."""

    path: str
    part: str
    value: object


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
