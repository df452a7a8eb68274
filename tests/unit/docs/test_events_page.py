"""docs/reference/events.md names every event that the sources emit, with its fields, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (ROOT / "service" / "shoal_service", ROOT / "api" / "shoal_api")
_TYPE = re.compile(r"^[a-z]+(\.[a-z_]+)?$")
_EMITTERS = {"emit", "Emit", "event", "record_event", "PendingEvent"}


def emitted() -> dict[str, set[str]]:
    """Every event type in the sources, with the fields that are spelled out there."""
    found: dict[str, set[str]] = {}
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            for type_, fields in _in_module(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(type_, set()).update(fields)
    return found


def _in_module(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in _EMITTERS:
            values = [*node.args, *(k.value for k in node.keywords)]
            types = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
            dicts = [v for v in values if isinstance(v, ast.Dict)]
            fields = {key for one in dicts for key in _keys(one)}
            if _name(node.func) == "emit":
                fields |= {k.arg for k in node.keywords if k.arg}
            if types and _TYPE.match(types[0]):
                yield types[0], fields
        elif isinstance(node, ast.Dict):  # a row of the events table
            types = [v.value for k, v in zip(node.keys, node.values, strict=True) if _is_type_key(k, v)]
            yield from ((type_, set()) for type_ in types)


def _is_type_key(key: ast.expr | None, value: ast.expr) -> bool:
    return (
        isinstance(key, ast.Constant) and key.value == "type"
        and isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith("job.")
    )  # fmt: skip


def _keys(node: ast.Dict) -> set[str]:
    return {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def documented() -> dict[str, set[str]]:
    rows = re.findall(
        r"^\| `([^`]+)` \| .+? \| (.+) \|$", (ROOT / "docs" / "reference" / "events.md").read_text("utf-8"), re.M
    )
    return {type_: set(re.findall(r"`([^`]+)`", data)) for type_, data in rows}


def test_the_sources_are_read() -> None:
    assert {"job.created", "job.state", "incident.opened", "supervisor.restarted", "validation"} <= set(emitted())


def test_every_event_type_is_documented_and_none_that_does_not_exist() -> None:
    assert set(documented()) == set(emitted())


def test_every_field_that_is_emitted_is_documented() -> None:
    page = documented()
    missing = {type_: fields - page[type_] for type_, fields in emitted().items() if fields - page[type_]}
    assert missing == {}


def test_no_field_is_documented_that_is_never_emitted() -> None:
    by_other_means = {"job.created", "job.state", "job.patched"}  # with **data, or in a row of its own
    sources = emitted()
    invented = {t: fields - sources[t] for t, fields in documented().items() if t not in by_other_means}
    assert {t: fields for t, fields in invented.items() if fields} == {}
