"""Finds the token that a client shows to a server. It is the first of these that exists:

    SHOAL_TOKEN in the environment
    the one that `shoal login` has stored for this address
    on the server's own machine: the owner's, which `shoal serve` wrote into its state directory (SHOAL_STATE_DIR, else
    the default one)

A token of the state directory is sent only to a loopback address, and only if the port is not another user's: whoever
listens there in the server's place would have it.
"""

from __future__ import annotations

import json
import os
from enum import Enum, auto
from pathlib import Path
from urllib.parse import urlsplit

from shoal_api.client.errors import UntrustedServer
from shoal_service.core.access import ADMIN_TOKEN_FILE, parse_token_id

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PORTS = {"http": 80, "https": 443}
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"


class TokenSource(Enum):
    ENVIRONMENT = auto()
    LOGIN = auto()
    OWNER = auto()


def find_token(url: str) -> str | None:
    """Return the token for the server at this URL; None if there is none. Raises UntrustedServer."""
    try:
        return os.environ.get("SHOAL_TOKEN") or read_stored_tokens().get(parse_origin(url)) or _find_owner_token(url)
    except ValueError:  # not a URL: the first request says so
        return None


def find_token_source(url: str) -> TokenSource | None:
    """Return where `find_token` found the token for this URL; None if it found none."""
    try:
        if os.environ.get("SHOAL_TOKEN"):
            return TokenSource.ENVIRONMENT
        if parse_origin(url) in read_stored_tokens():
            return TokenSource.LOGIN
        is_owners = urlsplit(url).hostname in LOOPBACK and read_token_file(find_owner_file()) is not None
    except ValueError:
        return None
    return TokenSource.OWNER if is_owners else None


def find_owner_file() -> Path:
    """Return where a server on this machine has written the token of its owner."""
    return find_state_dir() / ADMIN_TOKEN_FILE


def find_ca_file() -> Path | None:
    """Return the certificates of authorities that a server's certificate may come from (SHOAL_CA_FILE); None for the
    usual ones."""
    given = os.environ.get("SHOAL_CA_FILE")
    return Path(given).expanduser() if given else None


def read_token_file(path: Path) -> str | None:
    """Return the token in a file; None if there is no such file, or it may not be read."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def find_state_dir() -> Path:
    given = os.environ.get("SHOAL_STATE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "shoal"


def find_logins_path() -> Path:
    """Return where `shoal login` stores tokens."""
    given = os.environ.get("XDG_CONFIG_HOME")
    return (Path(given) if given else Path.home() / ".config") / "shoal" / "tokens.json"


def read_stored_tokens() -> dict[str, str]:
    """Return the tokens that `shoal login` has stored, by the origin of the server."""
    try:
        tokens = json.loads(find_logins_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in tokens.items()} if isinstance(tokens, dict) else {}


def store_token(url: str, token: str | None) -> Path:
    """Keep a token for a server, readable by this user alone. None forgets it."""
    path = find_logins_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tokens = read_stored_tokens()
    tokens.pop(parse_origin(url), None)
    if token is not None:
        tokens[parse_origin(url)] = token
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(tokens, file, indent=1)
    draft.replace(path)  # in one step, so that another command never reads half a file
    return path


def forget_token(url: str, token_id: str) -> bool:
    """Forget the token that is kept for a server if it has this id; it was revoked. Return whether it was kept."""
    stored = read_stored_tokens().get(parse_origin(url))
    if stored is None or parse_token_id(stored) != token_id:
        return False
    store_token(url, None)
    return True


def parse_origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme, 0)
    return f"{parts.scheme}://{parts.hostname or ''}:{port}"


def _find_owner_token(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK:
        return None
    path = find_owner_file()
    token = read_token_file(path)
    if token is None:
        return None
    port = parts.port or _PORTS.get(parts.scheme, 0)
    owner = find_port_owner(port)
    # root, this user and the owner of the file can read the token anyway
    if owner is not None and owner not in (0, os.getuid(), path.stat().st_uid):
        raise UntrustedServer(url, owner, str(path))
    return token


def find_port_owner(port: int, tables: tuple[Path, ...] = _TABLES) -> int | None:
    """Return the user id of the process that listens on a TCP port of loopback or of all addresses, as Linux says in
    /proc/net/tcp; None if it is not known, as on other systems. No connection is opened.

    If several listen there, one that is not root is named.
    """
    owners: set[int] = set()
    for table in tables:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 7 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                owners.add(int(fields[7]))
    return max(owners, default=None)
