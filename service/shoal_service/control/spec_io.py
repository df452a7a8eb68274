"""Parses the text of a job spec (YAML or JSON) and validates it. The text may be hostile.

Refused before any value is built: more than 1 MiB, aliases (a few lines of YAML can grow without bound), deep nesting,
too many values, a duplicate key, and values that JSON does not have. The time that this takes is linear in the size.
Errors name the line if it is known. `encode` writes a spec as YAML. Called by the HTTP edge, the CLI and
the Python client.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml

from shoal_workers.contract import JobSpec
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.json_values import MAX_VALUES, YAML_NUMBERS, Link, path_of

MAX_SPEC_BYTES = 1 << 20
MAX_DEPTH = 64


_INT, _FLOAT = YAML_NUMBERS


class SpecLoader(yaml.CSafeLoader):
    """Times and dates stay as they are written, since a spec is a JSON document: 12:30 is text, not the number 750. In
    YAML 1.1 it is a number to the base of 60, and a long one takes minutes to convert. Numbers are YAML_NUMBERS."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - an instance variable for the type checker
        first: [(tag, YAML_NUMBERS.get(tag, pattern)) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: Any) -> int:
        return int(super().construct_yaml_int(_without_colons(node)))

    def construct_yaml_float(self, node: Any) -> float:
        return float(super().construct_yaml_float(_without_colons(node)))


SpecLoader.add_constructor(_INT, SpecLoader.construct_yaml_int)
SpecLoader.add_constructor(_FLOAT, SpecLoader.construct_yaml_float)


def _without_colons(node: yaml.ScalarNode) -> yaml.ScalarNode:
    """The value of a node that is tagged as a number by hand. Raises ConstructorError if there is a colon in it."""
    if ":" in node.value:
        raise yaml.constructor.ConstructorError(None, None, "not a number", node.start_mark)
    return node


class SpecFormat(StrEnum):
    YAML = "yaml"
    JSON = "json"

    @staticmethod
    def of(hint: str) -> SpecFormat:
        """Return the format that a media type or a file name stands for: JSON, otherwise YAML."""
        kind = hint.partition(";")[0].strip().lower()
        return SpecFormat.JSON if kind.endswith("json") else SpecFormat.YAML


class SpecDumper(yaml.SafeDumper):
    """Puts every text in quotes that SpecLoader, or another reader of YAML, would take for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - an instance variable for the type checker
        first: [*resolvers, *SpecLoader.yaml_implicit_resolvers.get(first, [])]
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def encode(spec: JobSpec) -> str:
    """Return the spec as YAML, with the keys that differ from their defaults only."""
    document = spec.model_dump(mode="json", exclude_defaults=True)
    return yaml.dump(document, Dumper=SpecDumper, sort_keys=False, allow_unicode=True)


def parse_text(text: str, spec_format: SpecFormat) -> JobSpec:
    """Parse and validate a spec. Raises SpecError with every problem; for YAML also with its line."""
    document, lines = decode(text, spec_format)
    return parse_document(document, lines)


def parse_document(document: Any, lines: Lines) -> JobSpec:
    """Validate what `decode` has returned. Raises SpecError as `parse_text` does."""
    try:
        return parse_spec(document)
    except SpecError as error:
        raise SpecError(tuple(_with_line(problem, lines) for problem in error.problems)) from None


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a YAML document's keys, looked up for problems only."""

    root: yaml.Node | None = None
    _children: dict[int, dict[str, tuple[int, yaml.Node]]] = field(default_factory=dict)
    """Keys of the nodes that were looked into, by the Python id of the node: line and value of each key."""

    def of(self, path: str) -> int | None:
        """The line of the key at a dotted path, or of the nearest enclosing one; None if it is not known."""
        parts, line, node, at = path.split("."), None, self.root, 0
        while node is not None and at < len(parts):
            children = self._of(node)
            ends = range(at + 1, len(parts) + 1)  # a key may have dots in it
            end = next((end for end in ends if ".".join(parts[at:end]) in children), None)
            if end is None:
                break
            line, node = children[".".join(parts[at:end])]
            at = end
        return line

    def _of(self, node: yaml.Node) -> dict[str, tuple[int, yaml.Node]]:
        if id(node) not in self._children:
            children: dict[str, tuple[int, yaml.Node]] = {}
            if isinstance(node, yaml.MappingNode):
                children = {str(key.value): (key.start_mark.line + 1, value) for key, value in node.value}
            elif isinstance(node, yaml.SequenceNode):
                children = {str(i): (value.start_mark.line + 1, value) for i, value in enumerate(node.value)}
            self._children[id(node)] = children
        return self._children[id(node)]


def decode(text: str, spec_format: SpecFormat) -> tuple[Any, Lines]:
    """The plain values of a document, and the lines of its keys if it is YAML. Raises SpecError."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _error("The document holds half of a UTF-16 surrogate pair, which is not a character.") from None
    if size > MAX_SPEC_BYTES:
        raise _error(f"The document has {size} bytes; a job spec has at most {MAX_SPEC_BYTES} (1 MiB).")
    document, lines = _decode_yaml(text) if spec_format is SpecFormat.YAML else (_decode_json(text), Lines())
    _require_plain(document, None, 1)
    return document, lines


def _decode_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise _error(f"Not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    except RecursionError:
        raise _too_deep() from None
    except SpecError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise _error(f"Not valid JSON: {error}.") from None


def _decode_yaml(text: str) -> tuple[Any, Lines]:
    try:
        _require_tame(text)  # on the flat stream of events, since composing and constructing recurse
        loader = SpecLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None, Lines()
            _require_unique_keys(root, None)
            return loader.construct_document(root), Lines(root)
        finally:
            loader.dispose()
    except SpecError:
        raise
    except yaml.MarkedYAMLError as error:
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise _error(f"Not valid YAML: {error.problem or error.context}{where}.") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, LookupError, AttributeError) as error:
        # the last two come from a value that does not fit the tag that is written before it: !!bool maybe
        raise _error(f"Not valid YAML: {' '.join(str(error).split())[:300]}.") from None


def _require_tame(text: str) -> None:
    depth = num_values = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        num_values += isinstance(event, yaml.NodeEvent)
        if num_values > 2 * MAX_VALUES:  # keys count here
            raise _error(f"The document has more than {MAX_VALUES:,} values.")
        if isinstance(event, yaml.AliasEvent):
            where = f" (line {event.start_mark.line + 1})" if event.start_mark else ""
            raise _error(f"YAML aliases (*name) are not accepted: write the values out{where}.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _require_unique_keys(node: yaml.Node, place: Link | None) -> None:
    """Refuse a key that is there twice: YAML would silently use the last one."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _error(f"the key {str(name)[:80]!r} is not a string: put it in quotes (line {line}).", place)
            if name in seen:
                raise _error(f"the key is given twice (line {line}).", (place, name))
            seen.add(name)
            _require_unique_keys(value, (place, name))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _require_unique_keys(value, (place, i))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _error(f"the key {key[:80]!r} is given twice in one object.")
        made[key] = value
    return made


def _require_plain(value: Any, place: Link | None, depth: int) -> None:
    """Refuse what JSON cannot express, or what a database may not be able to store."""
    if depth > MAX_DEPTH:
        raise _too_deep()
    match value:
        case dict():
            for key, item in value.items():
                _require_text(key, place)
                _require_plain(item, (place, key), depth + 1)
        case list():
            for i, item in enumerate(value):
                _require_plain(item, (place, i), depth + 1)
        case str():
            _require_text(value, place)
        case float() if not math.isfinite(value):
            raise _error(f"{value} is not a finite number.", place)
        case int() if value.bit_length() > 1024:
            raise _error("an integer of more than 1024 bits.", place)
        case None | int() | float():
            pass
        case _:
            raise _error(f"{type(value).__name__} {str(value)[:80]!r}: put it in quotes to make it a string.", place)


def _require_text(text: str, place: Link | None) -> None:
    if "\0" in text or (not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)):
        raise _error("the text holds a NUL or half of a surrogate pair.", place)


def _with_line(problem: SpecProblem, lines: Lines) -> SpecProblem:
    """Add the line of the key, or of the nearest enclosing one."""
    line = lines.of(problem.path) if problem.path else None
    if line is None:
        return problem
    return SpecProblem(path=problem.path, message=f"{problem.message.removesuffix('.')} (line {line}).")


def _too_deep() -> SpecError:
    return _error(f"The document is nested deeper than {MAX_DEPTH} levels.")


def _error(message: str, place: Link | None = None) -> SpecError:
    return SpecError.at(path_of(place), message)
