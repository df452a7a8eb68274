"""The forms of tokens. An API token is `shoal_`, an id of 8 letters and digits, `_`, and a secret of 256 bits. The
token of an attempt is `shoal-attempt_` and such a secret.

The id names an API token everywhere and is no secret. Of a whole token the service keeps only the SHA-256: the secret
is random and long, so that a slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets

ADMIN_TOKEN_FILE = "admin-token"
"""Name of the file in the state directory that has the token of the server's owner."""
GATEWAY_TOKEN_FILE = "gateway-token"
"""The same, after the name of a cluster and a hyphen: the token of the gateway that the server starts."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_FORM = re.compile(r"shoal_([0-9a-z]{8})_[A-Za-z0-9_-]{43}")
_ATTEMPT_PREFIX = "shoal-attempt_"


def new_token() -> str:
    token_id = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    return f"shoal_{token_id}_{secrets.token_urlsafe(32)}"


def new_attempt_token() -> str:
    """The token of one attempt, for its supervisor."""
    return f"{_ATTEMPT_PREFIX}{secrets.token_urlsafe(32)}"


def is_attempt_token(token: str) -> bool:
    """Whether it has the form of one."""
    return token.startswith(_ATTEMPT_PREFIX)


def id_of(token: str) -> str | None:
    """The id of a token; None: it does not have the form of one."""
    found = _FORM.fullmatch(token)
    return found.group(1) if found else None


def hash_of(secret: str) -> str:
    """What is stored of a token, or of a session's cookie."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
