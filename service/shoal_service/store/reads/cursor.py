"""Cursors of the job list: opaque to clients, checked when a client sends one back."""

from __future__ import annotations

import base64
import binascii
import re

from shoal_service.store.errors import InvalidCursor

_PLAIN = re.compile(rb"jobs:([0-9]{1,18})")


def encode(num: int) -> str:
    """The cursor of the page after job `num`."""
    return base64.urlsafe_b64encode(b"jobs:%d" % num).decode().rstrip("=")


def decode(cursor: str) -> int:
    """Raises InvalidCursor: `encode` did not make it."""
    try:
        plain = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidCursor(cursor) from error
    match = _PLAIN.fullmatch(plain)
    if match is None:
        raise InvalidCursor(cursor)
    return int(match.group(1))
