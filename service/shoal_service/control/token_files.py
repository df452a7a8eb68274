"""Tokens in files. Two are in the state directory, where no other user can read them: that of the server's owner, and
that of the gateway which the server starts. One is provided by whoever deploys a server and a gateway elsewhere.

The command line and the Python client on the same machine read the first one, so that loopback is protected without a
further step. A file that is there already is adopted, so that it can be provided (a mounted secret), and so that a new
database keeps the token. It is replaced if it was revoked, or if others could read it.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from shoal_service.access_views import ClusterTokenRequest, TokenRequest
from shoal_service.core.access import ADMIN_TOKEN_FILE, BOOTSTRAP, GATEWAY_TOKEN_FILE, Role, id_of, new_token
from shoal_service.problems import SettingsError
from shoal_service.store import Store, access, cluster_links

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NOT_VALID = "It was revoked: write another token into the file, and restart the server and the gateway that reads it."
_log = logging.getLogger(__name__)


def ensure_admin_token(store: Store, state_dir: Path, *, now: float) -> Path:
    """Make sure that the file has a token of role admin that the store knows. Servers that start at the same time,
    with one file or with equal ones, take the same token. Raises OSError: the file cannot be written."""
    path = state_dir / ADMIN_TOKEN_FILE
    stored_token = _read(path)
    if stored_token is None:
        _write(path, new_token(), replaces=False)
        stored_token = _read(path)
    if stored_token is not None:
        if store.reading(access.find_principal_by_token)(stored_token, now=now) is not None:
            return path
        _register(store, stored_token, now)  # unless it is known: another server may register it now, or it was revoked
        if store.reading(access.find_principal_by_token)(stored_token, now=now) is not None:
            return path
    token = new_token()
    _register(store, token, now)
    _write(path, token)
    return path


def ensure_cluster_token(store: Store, state_dir: Path, cluster: str, *, now: float) -> str:
    """Make sure that the gateway of the server's own cluster has a token: that of the file, or a new one if the store
    does not know it, or it is not valid any more. Raises OSError."""
    path = state_dir / f"{cluster}-{GATEWAY_TOKEN_FILE}"
    token = _read(path)
    if token is not None:
        known = store.reading(access.find_principal_by_token)(token, now=now)
        if known is not None and known.cluster == cluster:
            return token
    made = store.writing(cluster_links.create_token)(cluster, ClusterTokenRequest(), by=BOOTSTRAP, now=now).token
    _write(path, made)
    return made


def register_cluster_token(store: Store, path: Path, cluster: str, *, now: float) -> None:
    """Let the gateway that shows the token of this file (setting cluster_token_file) join as `cluster`, and no more.

    A token that was revoked stays so: the server starts, warns, and refuses the gateway.

    Raises:
        SettingsError: the file cannot be read, has no token, or has one that is not of this cluster.
    """
    name = f"cluster_token_file {path}"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} cannot be read: {error}") from None
    if id_of(token) is None:
        raise SettingsError(
            f"{name} has no token of the form shoal_, 8 lower-case letters or digits, _ and 43 letters, digits, - or _."
        )
    view = store.writing(cluster_links.adopt_token)(cluster, token, by=BOOTSTRAP, now=now)
    if view.cluster != cluster:
        owner = f"of the cluster {view.cluster}" if view.cluster else f"{view.name}'s, of role {view.role}"
        raise SettingsError(f"{name} has a token that is {owner}: give the cluster {cluster} one of its own.")
    if store.reading(access.find_principal_by_token)(token, now=now) is None:
        _log.warning("cluster_token.not_valid", extra={"cluster": cluster, "token": view.id, "reason": _NOT_VALID})


def _read(path: Path) -> str | None:
    """Read the token in the file; None if there is none that can be used. One that others could read is deleted."""
    try:
        if path.stat().st_mode & _OTHERS and os.access(path.parent, os.W_OK):
            path.unlink()
            return None
        text = path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if id_of(text) is not None else None


def _register(store: Store, token: str, now: float) -> None:
    request = TokenRequest(name=BOOTSTRAP, role=Role.ADMIN, expires_in_s=None)
    store.writing(access.adopt_token)(token, request, by=BOOTSTRAP, now=now)


def _write(path: Path, token: str, *, replaces: bool = True) -> None:
    """Write the file in one step. Others can never read it, not even for a moment. `replaces`: a file that is there is
    replaced; otherwise it stays."""
    beside = path.with_name(f"{path.name}-{secrets.token_hex(4)}.writing")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{token}\n")
    if replaces:
        beside.replace(path)
        return
    with suppress(FileExistsError):  # another server was quicker
        path.hardlink_to(beside)
    beside.unlink()
