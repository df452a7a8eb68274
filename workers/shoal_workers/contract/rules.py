"""Rules over several keys of a spec, each declared once: when it is broken, what the user reads, and its JSON Schema.

    class SecretSource(Section):
        file: str | None = None
        env: str | None = None

        rules = (
            require_one(("file", "env"), "a secret has exactly one of file and env."),
            Rule(lambda secret: not is_absolute(secret.file), lambda secret: f"{secret.file!r} must be absolute."),
        )

A `Section` follows its rules when it is validated, after those of its single keys, and reports the first that is
broken. `checks.consistency` has the rules between sections. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from shoal_workers.contract.base import Frozen, exactly_one_of

S = TypeVar("S")


class SpecProblem(Frozen):
    """One problem of a spec."""

    path: str
    """Dotted path of the key, for example `batch.global_size`; empty for the spec as a whole."""
    message: str


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """One rule over a section, or over a whole spec."""

    is_broken: Callable[[S], object]
    text: str | Callable[[S], str]
    """The problem, with the values and the way out."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The same rule in a JSON Schema; empty if it is in none."""

    def describe(self, section: S) -> str:
        """Return what the user reads if this section has broken the rule."""
        return self.text if isinstance(self.text, str) else self.text(section)


def require_one(keys: tuple[str, ...], text: str) -> Rule[Any]:
    """Make the rule that exactly one of these keys is set. `{given}` in the text stands for those that are."""

    def list_given(section: Any) -> list[str]:
        return [key for key in keys if getattr(section, key) is not None]

    return Rule(
        lambda section: len(list_given(section)) != 1,
        lambda section: text.replace("{given}", " and ".join(list_given(section)) or "none"),
        exactly_one_of(*keys),
    )


class Section(Frozen):
    """A part of a spec, whose keys must fit each other."""

    rules: ClassVar[tuple[Rule[Any], ...]] = ()

    @model_validator(mode="after")
    def _follow_rules(self) -> Self:
        for rule in self.rules:
            if rule.is_broken(self):
                raise ValueError(rule.describe(self))
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        document = super().__get_pydantic_json_schema__(schema, handler)
        for rule in cls.rules:
            handler.resolve_ref_schema(document).update(rule.schema)
        return document
