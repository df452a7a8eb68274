"""Reads a spec from a YAML or JSON file or standard input, and changes it as the command line says: `--set`,
options. It is not validated yet.

A relative `code.working_dir` starts at the directory of the file that names it, so a spec can be moved with its code.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal_api.cli.session import CliError, explain_read_errors
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.core.key_paths import NotASection, assign
from shoal_workers.contract.checks.spec_errors import SpecError

_MAX_BYTES = 4 * 1024 * 1024


def load_spec(source: str, assignments: Iterable[str] = (), options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the decoded document of `source` ("-": standard input), completed. Not yet validated."""
    if source.endswith(".py"):
        raise CliError(
            f"{source} is a Python program, not a job spec",
            hint=f"shoal submit {source} submits it, shoal check {source} says what it can use; see docs/porting.md",
        )
    if source.endswith((".sh", ".ipynb")):
        raise CliError(
            f"{source} is neither a job spec nor a Python program",
            hint="name the script that it starts: shoal submit train.py --workers 2 -- ARGUMENTS; see docs/porting.md",
        )
    text = sys.stdin.read(_MAX_BYTES + 1) if source == "-" else _read(Path(source))
    if len(text) > _MAX_BYTES:
        raise CliError(f"the spec {source} is larger than {_MAX_BYTES} bytes", hint="check that it is a job spec")
    document = decode_spec(text, source)
    if source != "-":
        document = _with_absolute_code(document, Path(source).resolve().parent)
    return complete(document, assignments, options or {})


def complete(document: dict[str, Any], assignments: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with `--set` applied, then the options of the command that are not None, by the path of the
    key that each replaces. Raises CliError."""
    document = apply_overrides(document, assignments)
    for path, value in options.items():
        if value is None:
            continue
        try:
            assign(document, path, value)
        except NotASection as error:
            raise CliError(f"the spec cannot have {path}: {error}", hint="`shoal schema` prints every key") from None
    return document


_TEXT_SECTIONS = ("code.env.", "labels.")
"""Sections whose values are texts."""


def apply_overrides(spec: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `spec` with every assignment (`--set key.path=value`) made in order. Values are YAML: `3`,
    `true`, `null`, `[a, b]`; those of variables and labels are texts as they stand.

    Missing sections of a path are created. Raises CliError for an assignment without `=`, and for a path through a
    value that is not a section.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(spec))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise CliError(f"--set {assignment!r} is not key.path=value", hint="for example: --set stop.steps=100")
        try:
            value = _parse_value(assignment, text)
            is_text = path.strip().startswith(_TEXT_SECTIONS) and not isinstance(value, str)
            assign(changed, path.strip(), text.strip() if is_text else value)
        except NotASection as error:
            raise CliError(
                f"--set {error}",
                hint="remove it from the spec, or set the whole section: --set parallelism='{dp_shard: 2}'",
            ) from None
    return changed


def _parse_value(assignment: str, text: str) -> Any:
    try:
        return decode(text, SpecFormat.YAML)[0]
    except SpecError as error:
        raise CliError(
            f"the value of --set {assignment!r} cannot be used: {error}",
            hint="quote text that has special characters: --set 'name=\"a: b\"'",
        ) from None


def decode_spec(text: str, source: str) -> dict[str, Any]:
    """Decode YAML, of which JSON is a subset, as the service does. The error names the line."""
    try:
        document, _ = decode(text, SpecFormat.YAML)
    except SpecError as error:
        raise CliError(f"{source} cannot be read as a job spec", details=tuple(str(error).splitlines())) from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise CliError(f"{source} is {kind}, not a job spec", hint="start from an example: examples/byte-lm.yaml")
    return document


def _read(path: Path) -> str:
    with explain_read_errors(path, "give a readable YAML or JSON file"), path.open(encoding="utf-8") as file:
        return file.read(_MAX_BYTES + 1)


def _with_absolute_code(document: dict[str, Any], base: Path) -> dict[str, Any]:
    code = document.get("code")
    if not isinstance(code, dict) or not isinstance(code.get("working_dir"), str):
        return document
    return {**document, "code": {**code, "working_dir": str((base / Path(code["working_dir"]).expanduser()).resolve())}}
