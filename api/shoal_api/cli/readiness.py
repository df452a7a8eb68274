"""What a server says of its own readiness, in words. Reads /readyz without the retries of the client."""

from __future__ import annotations

import httpx


def waits_for(url: str) -> str | None:
    """What a server that answers is still waiting for; None: it is ready. Raises httpx.TransportError, InvalidURL."""
    answer = _ask(url)
    if answer.status_code == 200:
        return None
    try:
        document = answer.json()
        errors = [f"{error['path']}: {error['message']}" for error in document.get("errors", ())]
        return ", ".join(errors) or str(document["detail"])
    except (ValueError, AttributeError, KeyError, TypeError):
        return f"an answer that Shoal would give (it is {answer.status_code})"


def warns_of(url: str) -> tuple[str, ...]:
    """What a server that is ready complains about. Raises httpx.TransportError, InvalidURL."""
    answer = _ask(url)
    try:
        return tuple(str(warning) for warning in answer.json().get("warnings", ()))
    except (ValueError, AttributeError, TypeError):
        return ()


def _ask(url: str) -> httpx.Response:
    return httpx.get(f"{url.rstrip('/')}/readyz", timeout=5.0, trust_env=False)
