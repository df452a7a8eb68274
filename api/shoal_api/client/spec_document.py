"""Makes the document that is sent from the spec that a user gives. Only the client knows the user's working directory,
login name and files.

`read_document` reads a spec; the other functions complete its document. The server validates it.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal_api.client.credentials import LOOPBACK
from shoal_service.control.spec_io import SpecFormat, decode
from shoal_workers.contract.checks.places import absolute
from shoal_workers.contract.placing import is_user
from shoal_workers.contract.spec import JobSpec


def read_document(spec: JobSpec | Mapping[str, Any] | str | Path) -> tuple[Any, Path]:
    """Return the spec as plain values, and the directory that its relative paths start from."""
    if isinstance(spec, JobSpec):
        return spec.model_dump(mode="json", exclude_unset=True), Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    path = Path(spec)
    return decode(path.read_text(encoding="utf-8"), SpecFormat.of(path.name))[0], path.parent


_PATHS = ("paths", "validation_paths")


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
        named = {key: data[key] for key in _PATHS if isinstance(data.get(key), list)}
        made = {
            key: [absolute(path, base) if isinstance(path, str) else path for path in paths]
            for key, paths in named.items()
        }
        document = document | {"data": data | made}
    return document


def with_user(document: Any) -> Any:
    """Return the document with the login name as `user`, unless it names one."""
    if not isinstance(document, dict) or "user" in document:
        return document
    name = user_of_login(_login_name())
    return document if name is None else document | {"user": name}


def user_of_login(login: str) -> str | None:
    """Return a login name in the letters that a user may have: "ada lovelace" becomes ada-lovelace. None if nothing is
    left of it."""
    name = re.sub(r"[^A-Za-z0-9._@-]+", "-", login).strip("-._@")[:63].rstrip("-._@")
    return name if is_user(name) else None


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user id has no entry
        return ""


def with_archive(document: Any, base: Path, pack: Callable[[Path], str]) -> Any:
    """Return the document with the sha256 of an archive instead of the working directory, if it names one. `pack`
    packs a directory and returns the sha256."""
    code = document.get("code") if isinstance(document, dict) else None
    if not isinstance(code, dict) or not isinstance(code.get("working_dir"), str) or code.get("archive"):
        return document
    working_dir = base / Path(code["working_dir"]).expanduser()
    return document | {"code": {**code, "working_dir": None, "archive": pack(working_dir)}}
