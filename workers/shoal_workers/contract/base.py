"""The base class of all values that cross a process boundary: frozen, and without unknown keys; and their version."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

WIRE_VERSION = 3
"""Version of all that supervisors, workers, journals and the control plane exchange. Raised when a document of a
released version changes; see tools/golden.py and docs/decisions/0021-versions-on-the-wire.md.

1: until supervisors had lives. 2: calls to workers carry the life; the journal has the orders without an answer.
3: since release 0.2.0 workers have new calls (`build_model`, `forward_metrics`, agents that poll), and documents new
keys; workers of version 2 are replaced and not called.
"""
PositiveInt = Annotated[int, Field(ge=1, le=2**53)]
"""A whole number that JSON keeps exactly."""


def exactly_one_of(*keys: str) -> dict[str, Any]:
    """Rule for a JSON Schema: exactly one of these keys is present and not null."""
    return {"oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]}


def if_set(key: str, then: dict[str, Any]) -> dict[str, Any]:
    """Rule for a JSON Schema: `then` holds if this key is present and not null."""
    condition = {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
    return {"if": condition, "then": then}


def whole(expression: str) -> str:
    """Pattern for a JSON Schema that must match the whole text; JSON Schema accepts a match of any part of it."""
    return f"^(?:{expression})$"


class Frozen(BaseModel):
    """A value: immutable, comparable, refuses unknown keys, and documents its fields in its JSON Schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Gives fields that a pickle lacks their defaults: Ray pickles messages, and those of an older release lack the
        fields that are new here."""
        super().__setstate__(state)
        for name, field in type(self).model_fields.items():
            if name not in self.__dict__ and not field.is_required():
                self.__dict__[name] = field.get_default(call_default_factory=True)
