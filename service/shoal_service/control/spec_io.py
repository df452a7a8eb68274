"""Parses the text of a job spec (YAML or JSON) and validates it. The text may be hostile.

Refused before any value is built: more than 1 MiB, aliases (a few lines of YAML can grow without bound), deep nesting,
a duplicate key, and values that JSON does not have. Errors name the line if it is known. Called by the HTTP edge, the
CLI and the Python client.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Any

import yaml

from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem, parse_spec
from shoal_workers.contract.spec import JobSpec

MAX_SPEC_BYTES = 1 << 20
MAX_DEPTH = 64


class SpecLoader(yaml.CSafeLoader):
    """Times stay as they are written, since a spec is a JSON document."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - an instance variable for the type checker
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }


class SpecFormat(StrEnum):
    YAML = "yaml"
    JSON = "json"

    @staticmethod
    def of(hint: str) -> SpecFormat:
        """From a media type or a file name. Anything but JSON is read as YAML, of which JSON is almost a subset."""
        kind = hint.partition(";")[0].strip().lower()
        return SpecFormat.JSON if kind.endswith("json") else SpecFormat.YAML


def parse_text(text: str, spec_format: SpecFormat) -> JobSpec:
    """Raises SpecError with every problem; for YAML also with its line."""
    document, lines = decode(text, spec_format)
    try:
        return parse_spec(document)
    except SpecError as error:
        raise SpecError(tuple(_with_line(problem, lines) for problem in error.problems)) from None


def decode(text: str, spec_format: SpecFormat) -> tuple[Any, dict[str, int]]:
    """The plain values of a document, and the line of each key path. Raises SpecError."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _error("The document holds half of a UTF-16 surrogate pair, which is not a character.") from None
    if size > MAX_SPEC_BYTES:
        raise _error(f"The document has {size} bytes; a job spec has at most {MAX_SPEC_BYTES} (1 MiB).")
    document, lines = _decode_yaml(text) if spec_format is SpecFormat.YAML else (_decode_json(text), {})
    _require_plain(document, "", 1)
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


def _decode_yaml(text: str) -> tuple[Any, dict[str, int]]:
    lines: dict[str, int] = {}
    try:
        _require_tame(text)  # on the flat stream of events, since composing and constructing recurse
        loader = SpecLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None, lines
            _walk(root, "", lines)
            return loader.construct_document(root), lines
        finally:
            loader.dispose()
    except SpecError:
        raise
    except yaml.MarkedYAMLError as error:
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise _error(f"Not valid YAML: {error.problem or error.context}{where}.") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise _error(f"Not valid YAML: {' '.join(str(error).split())[:300]}.") from None


def _require_tame(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            where = f" (line {event.start_mark.line + 1})" if event.start_mark else ""
            raise _error(f"YAML aliases (*name) are not accepted: write the values out{where}.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _walk(node: yaml.Node, path: str, lines: dict[str, int]) -> None:
    """Collects the line of every path. Refuses a duplicate key, of which YAML would silently use the last one."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            here = f"{path}.{name}" if path else name
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _error(f"the key {str(name)[:80]!r} is not a string: put it in quotes (line {line}).", path)
            if name in seen:
                raise _error(f"the key is given twice (line {line}).", here)
            seen.add(name)
            lines[here] = line
            _walk(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            here = f"{path}.{i}" if path else str(i)
            lines[here] = value.start_mark.line + 1
            _walk(value, here, lines)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _error(f"the key {key[:80]!r} is given twice in one object.")
        made[key] = value
    return made


def _require_plain(value: Any, path: str, depth: int) -> None:
    """Only what JSON can express and every database can store."""
    if depth > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, dict):
        for key, item in value.items():
            _require_text(key, path)
            _require_plain(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _require_plain(item, f"{path}.{i}" if path else str(i), depth + 1)
    elif isinstance(value, str):
        _require_text(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _error(f"{value} is not a finite number.", path)
    elif isinstance(value, int):
        if value.bit_length() > 1024:
            raise _error("an integer of more than 1024 bits.", path)
    elif value is not None:
        raise _error(f"{type(value).__name__} {str(value)[:80]!r}: put it in quotes to make it a string.", path)


def _require_text(text: str, path: str) -> None:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise _error("the text holds a NUL or half of a surrogate pair.", path)


def _with_line(problem: SpecProblem, lines: dict[str, int]) -> SpecProblem:
    """With the line of the key, or of the nearest enclosing one."""
    path = problem.path
    while path and path not in lines:
        path = path.rpartition(".")[0]
    if not path:
        return problem
    return SpecProblem(path=problem.path, message=f"{problem.message.removesuffix('.')} (line {lines[path]}).")


def _too_deep() -> SpecError:
    return _error(f"The document is nested deeper than {MAX_DEPTH} levels.")


def _error(message: str, path: str = "") -> SpecError:
    return SpecError((SpecProblem(path=path, message=message),))
