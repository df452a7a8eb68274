"""The spec that wrote a directory of checkpoints, for runs without a service: `shoal_workers.run` continues from what
it finds, and another spec must not take its checkpoints over unnoticed.

Called on rank 0, before the run. A job of the service has its spec in the database and a directory of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shoal_workers.checkpoint.storage import Directory, open_directory
from shoal_workers.contract import JobSpec

NAME = "spec.json"
_DECISIVE = (
    *("task", "code", "model", "data", "batch", "optimizer", "schedule", "stop"),
    *("precision", "module_precision", "reduce_precision", "fp8", "seed", "deterministic"),
)
"""The keys that change what is computed. The others say where, how fast and how safely."""


@dataclass(eq=False)
class SpecChanged(ValueError):
    """The checkpoints under `root` were written with other values of `keys`."""

    code = "spec_changed"

    root: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"The checkpoints in {self.root} were written with another spec: {', '.join(self.keys)} differ."


def note_spec(root: str, spec: JobSpec, *, may_differ: bool) -> None:
    """Write the spec beside the checkpoints under `root`, a directory or an fsspec URL.

    Raises:
        SpecChanged: a note of another spec is there, and `may_differ` is not set.
        OSError: the storage fails.
    """
    place = open_directory(root)
    document = spec.model_dump(mode="json")
    if not may_differ:
        keys = differences(_known(place), document)
        if keys:
            raise SpecChanged(root, keys)
    place.create()
    place.write(NAME, [json.dumps(document).encode()])


def differences(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """Dotted keys of two specs whose values differ, and that change what is computed. A key that only one of them has
    (a later release adds some) does not differ."""
    keys: list[str] = []
    for key in _DECISIVE:
        old, new = before.get(key), after.get(key)
        if key not in before or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts = sorted(part for part in old.keys() | new.keys() if old.get(part) != new.get(part))
            keys += [f"{key}.{part}" for part in parts]
        else:
            keys.append(key)
    return tuple(keys)


def _known(place: Directory) -> dict[str, Any]:
    """Return an empty dict if there is no note, or if it cannot be read."""
    try:
        document = json.loads(place.read(NAME))
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
