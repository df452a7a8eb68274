"""Sets values in a document by dotted paths of keys, as `--set` and the grid of a sweep name them. Pure.

The command line and `sweeps` refuse the same paths in the same words, since both call this.
"""

from __future__ import annotations

from typing import Any


class NotASection(ValueError):
    """A part of the path is a value without keys."""

    def __init__(self, path: str, part: str, value: object) -> None:
        super().__init__(path, part, value)
        self.path = path
        self.part = part
        self.value = value

    def __str__(self) -> str:
        return f"{self.path}: {self.part} is {self.value!r}, not a section with keys"


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
