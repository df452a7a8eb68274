"""A relative `checkpoint.url` starts at the user's working directory; only the client knows that.

On another machine than the server's nothing is changed: the server refuses a relative path, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal_workers.contract.checks.places import absolute

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def with_absolute_checkpoint(document: Any, server_url: str, base: Path) -> Any:
    """The document of a spec, which is not validated yet. `base`: the user's working directory."""
    checkpoint = document.get("checkpoint") if isinstance(document, dict) else None
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("url"), str):
        return document
    if urlsplit(server_url).hostname not in _LOOPBACK:
        return document
    return document | {"checkpoint": {**checkpoint, "url": absolute(checkpoint["url"], base)}}
