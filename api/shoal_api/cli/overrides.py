"""`--set key.path=value`: changes a spec on the command line before it is validated. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from shoal_api.cli.errors import CliError
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_service.core.key_paths import NotASection, assign
from shoal_workers.contract.checks.spec_errors import SpecError


def apply_overrides(spec: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `spec` with every assignment made in order. Values are YAML: `3`, `true`, `null`, `[a, b]`.

    Missing sections of a path are created. Raises CliError for an assignment without `=`, and for a path through a
    value that is not a section.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(spec))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise CliError(f"--set {assignment!r} is not key.path=value", hint="for example: --set stop.steps=100")
        try:
            assign(changed, path.strip(), _value(assignment, text))
        except NotASection as error:
            raise CliError(
                f"--set {error}",
                hint="remove it from the spec, or set the whole section: --set parallelism='{dp_shard: 2}'",
            ) from None
    return changed


def _value(assignment: str, text: str) -> Any:
    try:
        return decode(text, SpecFormat.YAML)[0]
    except SpecError as error:
        raise CliError(
            f"the value of --set {assignment!r} cannot be used: {error}",
            hint="quote text that has special characters: --set 'name=\"a: b\"'",
        ) from None
