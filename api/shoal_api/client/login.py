"""The `user` of a submitted spec that names none: the login name. Only the client knows it."""

from __future__ import annotations

import getpass
import re
from typing import Any

from shoal_workers.contract.placing import is_user


def with_user(document: Any) -> Any:
    """The document of a spec, which is not validated yet, with the login name as `user` unless it names one."""
    if not isinstance(document, dict) or "user" in document:
        return document
    name = user_of_login(_login_name())
    return document if name is None else document | {"user": name}


def user_of_login(login: str) -> str | None:
    """A login name in the letters that a user may have: "ada lovelace" is ada-lovelace. None: nothing is left of it."""
    name = re.sub(r"[^A-Za-z0-9._@-]+", "-", login).strip("-._@")[:63].rstrip("-._@")
    return name if is_user(name) else None


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user id has no entry
        return ""
