"""`--set key.path=value`: changes a spec on the command line before it is validated. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from shoal_api.cli.errors import CliError
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_workers.contract.checks.spec_errors import SpecError


def apply_overrides(spec: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of `spec` with every assignment made in order; values are read as YAML (`3`, `true`, `null`, `[a, b]`).

    Missing sections of a path are created. Raises CliError for an assignment without `=`, and for a path through a
    value that is not a section.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(spec))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise CliError(f"--set {assignment!r} is not key.path=value", hint="for example: --set stop.steps=100")
        _assign(changed, keys, _value(assignment, text))
    return changed


def _value(assignment: str, text: str) -> Any:
    try:
        return decode(text, SpecFormat.YAML)[0]
    except SpecError as error:
        raise CliError(
            f"the value of --set {assignment!r} cannot be used: {error}",
            hint="quote text that has special characters: --set 'name=\"a: b\"'",
        ) from None


def _assign(spec: dict[str, Any], keys: list[str], value: Any) -> None:
    here = spec
    for depth, key in enumerate(keys[:-1]):
        section = here.setdefault(key, {})
        if not isinstance(section, dict):
            raise CliError(
                f"--set {'.'.join(keys)}: {'.'.join(keys[: depth + 1])} is {section!r}, not a section with keys",
                hint="remove it from the spec, or set the whole section: --set parallelism='{dp_shard: 2}'",
            )
        here = section
    here[keys[-1]] = value
