"""Completes the spec that a user gives to the client with what only the user's machine knows: working directory, login
name, and files of the code. The server validates the document.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from shoal_api.client.credentials import LOOPBACK
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_workers.contract import JobSpec, is_user
from shoal_workers.contract.checks.places import absolute

SpecSource: TypeAlias = JobSpec | Mapping[str, Any] | str | Path
"""A spec, or the path of a YAML or JSON file that holds one."""
_DATA_PATHS = ("paths", "validation_paths")


def prepare_document(spec: SpecSource, server_url: str) -> tuple[Any, Path]:
    """Return the spec as plain values, with absolute paths and a user, and the directory that the path of its code
    starts from."""
    document, base = read_document(spec)
    return with_user(with_absolute_paths(document, server_url, Path.cwd())), base


def read_document(spec: SpecSource) -> tuple[Any, Path]:
    """Return the spec as plain values, and the directory that its relative paths start from."""
    if isinstance(spec, JobSpec):
        return spec.model_dump(mode="json", exclude_unset=True), Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    path = Path(spec)
    return decode(path.read_text(encoding="utf-8"), SpecFormat.of(path.name))[0], path.parent


def with_absolute_paths(document: Any, server_url: str, base: Path) -> Any:
    """Return the document with a relative `checkpoint.url` made absolute: it starts at `base`, the user's working
    directory. So do `data.paths` and `data.validation_paths`, unless the job has code, whose directory has its data.

    Nothing is changed for a server on another machine, which refuses a relative URL with the reason.
    """
    if not isinstance(document, dict) or urlsplit(server_url).hostname not in LOOPBACK:
        return document
    checkpoint, data = document.get("checkpoint"), document.get("data")
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("url"), str):
        document = document | {"checkpoint": {**checkpoint, "url": absolute(checkpoint["url"], base)}}
    if isinstance(data, dict) and "code" not in document:
        absolute_paths = {
            key: [absolute(path, base) if isinstance(path, str) else path for path in data[key]]
            for key in _DATA_PATHS
            if isinstance(data.get(key), list)
        }
        document = document | {"data": data | absolute_paths}
    return document


def with_user(document: Any) -> Any:
    """Return the document with the login name as `user`, unless it names one."""
    if not isinstance(document, dict) or "user" in document:
        return document
    try:
        name = find_user_name(getpass.getuser())
    except (KeyError, OSError, ImportError):  # a container whose user id has no entry
        name = None
    return document if name is None else document | {"user": name}


def find_user_name(login: str) -> str | None:
    """Return a login name in the letters that a user may have: "ada lovelace" becomes ada-lovelace. None if nothing is
    left of it."""
    name = re.sub(r"[^A-Za-z0-9._@-]+", "-", login).strip("-._@")[:63].rstrip("-._@")
    return name if is_user(name) else None


def with_archive(document: Any, base: Path, pack: Callable[[Path], str]) -> Any:
    """Return the document with the sha256 of an archive instead of the working directory, if it names one. `pack`
    packs a directory and returns the sha256."""
    code = document.get("code") if isinstance(document, dict) else None
    if not isinstance(code, dict) or not isinstance(code.get("working_dir"), str) or code.get("archive"):
        return document
    working_dir = base / Path(code["working_dir"]).expanduser()
    return document | {"code": {**code, "working_dir": None, "archive": pack(working_dir)}}
