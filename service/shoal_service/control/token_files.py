"""Keep the tokens that are in files the same as those in the store.

    admin token              state directory        the command line and the Python client on this machine read it
    gateway token            state directory        the gateway that the server starts reads it
    cluster_token_file       path in the settings   a gateway that was deployed elsewhere has the same file

Other users cannot read the state directory, so loopback is protected without a further step. A token that is in a file
already is adopted: it can be a mounted secret, and a new database keeps it. A token is replaced if it was revoked or
if other users could read its file.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from shoal_service.access_views import ClusterTokenRequest, TokenRequest
from shoal_service.core.access import ADMIN_TOKEN_FILE, BOOTSTRAP, GATEWAY_TOKEN_FILE, Role, new_token, parse_token_id
from shoal_service.problems import SettingsError
from shoal_service.store import Store, access, cluster_links

_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_REVOKED = "It was revoked: write another token into the file, and restart the server and the gateway that reads it."
_log = logging.getLogger(__name__)


def ensure_admin_token(store: Store, state_dir: Path, *, now: float) -> Path:
    """Make sure that the file has a valid token of role admin, and return its path.

    Servers that start at the same time, with one file or with equal ones, take the same token.

    Raises:
        OSError: the file cannot be written.
    """
    path = state_dir / ADMIN_TOKEN_FILE
    stored_token = _read(path)
    if stored_token is None:
        _write(path, new_token(), replaces=False)
        stored_token = _read(path)
    if stored_token is not None:
        if store.reading(access.find_principal_by_token)(stored_token, now=now) is not None:
            return path
        _register(store, stored_token, now)  # no effect if another server registers it now, or if it was revoked
        if store.reading(access.find_principal_by_token)(stored_token, now=now) is not None:
            return path
    token = new_token()
    _register(store, token, now)
    _write(path, token)
    return path


def ensure_cluster_token(store: Store, state_dir: Path, cluster: str, *, now: float) -> str:
    """Return a valid token for the gateway of the server's own cluster.

    It is the token in the file; a new one if that is not valid, or is not of this cluster.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = state_dir / f"{cluster}-{GATEWAY_TOKEN_FILE}"
    token = _read(path)
    if token is not None:
        principal = store.reading(access.find_principal_by_token)(token, now=now)
        if principal is not None and principal.cluster == cluster:
            return token
    token = store.writing(cluster_links.create_token)(cluster, ClusterTokenRequest(), by=BOOTSTRAP, now=now).token
    _write(path, token)
    return token


def register_cluster_token(store: Store, path: Path, cluster: str, *, now: float) -> None:
    """Let a gateway join as `cluster` with the token in this file.

    The token permits nothing else. A revoked token stays revoked: the server logs a warning, and refuses the gateway.

    Raises:
        SettingsError: the file cannot be read, has no token, or has one that is not of this cluster.
    """
    name = f"cluster_token_file {path}"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} cannot be read: {error}") from None
    if parse_token_id(token) is None:
        raise SettingsError(
            f"{name} has no token of the form shoal_, 8 lower-case letters or digits, _ and 43 letters, digits, - or _."
        )
    view = store.writing(cluster_links.adopt_token)(cluster, token, by=BOOTSTRAP, now=now)
    if view.cluster != cluster:
        owner = f"of the cluster {view.cluster}" if view.cluster else f"{view.name}'s, of role {view.role}"
        raise SettingsError(f"{name} has a token that is {owner}: give the cluster {cluster} one of its own.")
    if store.reading(access.find_principal_by_token)(token, now=now) is None:
        _log.warning("cluster_token.not_valid", extra={"cluster": cluster, "token": view.id, "reason": _REVOKED})


def _read(path: Path) -> str | None:
    """Return the token in the file; None if it has no text of this form. Delete a file that others could read."""
    try:
        if path.stat().st_mode & _ACCESS_BY_OTHERS and os.access(path.parent, os.W_OK):
            path.unlink()
            return None
        text = path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if parse_token_id(text) is not None else None


def _register(store: Store, token: str, now: float) -> None:
    request = TokenRequest(name=BOOTSTRAP, role=Role.ADMIN, expires_in_s=None)
    store.writing(access.adopt_token)(token, request, by=BOOTSTRAP, now=now)


def _write(path: Path, token: str, *, replaces: bool = True) -> None:
    """Write the file in one step; other users cannot read it at any time.

    Args:
        replaces: False if an existing file stays as it is.
    """
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(4)}.writing")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{token}\n")
    if replaces:
        temporary.replace(path)
        return
    with suppress(FileExistsError):  # another server was quicker
        path.hardlink_to(temporary)
    temporary.unlink()
