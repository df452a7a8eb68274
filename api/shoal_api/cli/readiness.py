"""What a server says of its own readiness, in words. Reads /readyz without the retries of the client."""

from __future__ import annotations

import httpx


def waits_for(url: str) -> str | None:
    """What a server that answers is still waiting for; None: it is ready. Raises httpx.TransportError, InvalidURL."""
    answer = httpx.get(f"{url.rstrip('/')}/readyz", timeout=5.0, trust_env=False)
    if answer.status_code == 200:
        return None
    try:
        document = answer.json()
        errors = [f"{error['path']}: {error['message']}" for error in document.get("errors", ())]
        return ", ".join(errors) or str(document["detail"])
    except (ValueError, AttributeError, KeyError, TypeError):
        return f"an answer that Shoal would give (it is {answer.status_code})"
