"""Reads `/readyz` of a server, without the retries of the client."""

from __future__ import annotations

import httpx

from shoal_api.client.credentials import find_ca_file
from shoal_api.client.transport import certificates


def waits_for(url: str) -> str | None:
    """Return what a running server waits for before it is ready; None if it is ready. Raises httpx.TransportError,
    InvalidURL."""
    answer = _get(url)
    if answer.status_code == 200:
        return None
    try:
        document = answer.json()
        errors = [f"{error['path']}: {error['message']}" for error in document.get("errors", ())]
        return ", ".join(errors) or str(document["detail"])
    except (ValueError, AttributeError, KeyError, TypeError):
        return f"a Shoal server (another program answers there, with status {answer.status_code})"


def read_warnings(url: str) -> tuple[str, ...]:
    """Return the warnings of a server that is ready. Raises httpx.TransportError, InvalidURL."""
    answer = _get(url)
    try:
        return tuple(str(warning) for warning in answer.json().get("warnings", ()))
    except (ValueError, AttributeError, TypeError):
        return ()


def _get(url: str) -> httpx.Response:
    return httpx.get(
        f"{url.rstrip('/')}/readyz", timeout=5.0, trust_env=False, verify=certificates(url, find_ca_file())
    )
