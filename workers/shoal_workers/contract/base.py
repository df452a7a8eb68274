"""The base class of all values that cross a process boundary: frozen, and without unknown keys; and their version."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

WIRE_VERSION = 3
"""Version of all that supervisors, workers, journals and the control plane exchange. Raised when a document of a
released version changes; see tools/golden.py and docs/decisions/0021-versions-on-the-wire.md.

3 is the first version that later releases read. Workers of another version are replaced and not called.
"""
PositiveInt = Annotated[int, Field(ge=1, le=2**53)]
"""A whole number that JSON keeps exactly."""


def exactly_one_of(*keys: str) -> dict[str, Any]:
    """Return the rule of a JSON Schema that exactly one of these keys is present and not null."""
    return {"oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys]}


def if_set(key: str, then: dict[str, Any]) -> dict[str, Any]:
    """Return the rule of a JSON Schema that `then` holds if this key is present and not null."""
    condition = {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
    return {"if": condition, "then": then}


def whole(expression: str) -> str:
    """Return a pattern that must match the whole text; JSON Schema accepts a match of any part of it."""
    return f"^(?:{expression})$"


class FieldError(Exception):
    """An exception that is a dataclass: its message is `text` of its class, with the fields filled in.

    It survives pickling: `args` is what a pickle passes to the class.
    """

    text: ClassVar[str] = ""

    def __init_subclass__(cls, *, text: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.text = text or cls.text

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())

    def __str__(self) -> str:
        return self.text.format_map(vars(self)) if self.text else super().__str__()


class Frozen(BaseModel):
    """A value: immutable, comparable, refuses unknown keys, and documents its fields in its JSON Schema."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each property with the docstring of its field. Pydantic's own `use_attribute_docstrings` reads them
        when a class is made: almost half of the time that the control plane took to be imported."""
        document = handler(schema)
        properties = handler.resolve_ref_schema(document).get("properties", {})
        for name, text in read_field_docstrings(cls).items():
            for key in {name, cls.model_fields[name].alias} & properties.keys():
                properties[key].setdefault("description", text)
        return document

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Give fields that a pickle lacks their defaults: Ray pickles messages, and those of an older release lack the
        fields that are new here."""
        super().__setstate__(state)
        for name, field in type(self).model_fields.items():
            if name not in self.__dict__ and not field.is_required():
                self.__dict__[name] = field.get_default(call_default_factory=True)


@cache
def read_field_docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings of the fields of a class and of its bases, by the field's name."""
    docstrings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel and base.__module__ in sys.modules:
            docstrings |= _read_docstrings(sys.modules[base.__module__]).get(base.__qualname__, {})
    return {name: text for name, text in docstrings.items() if name in model.model_fields}


@cache
def _read_docstrings(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of attributes by qualified name of their class. Empty if there is no source."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return {}
    return dict(_walk_docstrings(ast.parse(source), ""))


def _walk_docstrings(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            docstrings: dict[str, str] = {}
            for statement, following in zip(node.body, node.body[1:], strict=False):
                match statement, following:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docstrings[name] = inspect.cleandoc(text)
            yield prefix + node.name, docstrings
            yield from _walk_docstrings(node, f"{prefix}{node.name}.")
