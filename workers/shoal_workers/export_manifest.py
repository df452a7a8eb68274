"""The manifest of an export: which model a directory holds, and the length and SHA-256 of each file that is whole.

    OUT/shoal-export.json     {"of": {"checkpoint": ..., "dtype": ...}, "files": {NAME: {"bytes": ..., "sha256": ...}},
                               "result": null until all files are there}

Files appear under their names when they are whole: they are written beside, as NAME.part, and moved. So an export that
was broken off goes on with the files that it lacks, a repeated one reads what is there and repairs what differs, and a
server of models can verify what it loads. A directory of another model is never written to. Called by `export.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "shoal-export.json"


class Manifest:
    """That of a directory, as it is in the storage after each call."""

    def __init__(self, out: Path, of: Mapping[str, Any]) -> None:
        """Reads the manifest, if there is one.

        Args:
            of: what the files depend on: the checkpoint and the settings of the export.

        Raises FileExistsError: the directory holds something else.
        """
        self._out = out
        self._of = dict(of)
        self._files: dict[str, dict[str, Any]] = {}
        self._result: dict[str, Any] | None = None
        manifest = _read(out / NAME)
        if manifest is None:
            if out.exists() and any(out.iterdir()):
                raise FileExistsError(f"{out} is not empty. Name an empty directory, or one that does not exist.")
            return
        if manifest["of"] != self._of:
            raise FileExistsError(
                f"{out} holds an export of {manifest['of'].get('checkpoint')} ({_settings(manifest['of'])}), not of "
                f"{self._of.get('checkpoint')} ({_settings(self._of)}). Name another directory, for example one for "
                "each version, or delete this one."
            )
        self._files, self._result = manifest["files"], manifest["result"]

    @property
    def result(self) -> dict[str, Any] | None:
        """What the export has returned, if all of its files are there and whole. None if it is not complete."""
        return self._result if self._result is not None and all(map(self.has, self._files)) else None

    def has(self, name: str) -> bool:
        """Return whether this file is there, and as it was written. Reads all of it."""
        recorded, path = self._files.get(name), self._out / name
        return recorded is not None and path.is_file() and recorded == _facts(path)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Calls `write` with the path of a file beside, moves it to its name and records it."""
        self._out.mkdir(parents=True, exist_ok=True)
        self._save()  # before the first file: what is broken off now is known to be this export
        part = self._out / f"{name}.part"
        write(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        facts = _facts(part)
        part.replace(self._out / name)
        self._files[name] = facts
        self._save()

    def complete(self, result: Mapping[str, Any]) -> None:
        self._result = dict(result)
        self._save()

    def _save(self) -> None:
        part = self._out / f"{NAME}.part"
        document = {"of": self._of, "files": self._files, "result": self._result}
        part.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        part.replace(self._out / NAME)


def _read(path: Path) -> dict[str, Any] | None:
    """None if there is no file, or it is not a manifest, so its directory is not an export's."""
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    is_one = isinstance(manifest, dict) and all(isinstance(manifest.get(key), dict) for key in ("of", "files"))
    return manifest if is_one and isinstance(manifest.get("result"), dict | None) else None


def _settings(of: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in of.items() if name != "checkpoint")


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
