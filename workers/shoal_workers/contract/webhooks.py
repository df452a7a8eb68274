"""The receivers of a job's events: which addresses, patterns of events and references to secrets a spec may have.

The secrets are the service's: a spec has the name of one and never its value. The control plane sends the events
(`control/webhooks`), and its settings name the receivers of the whole service with the same class. Pure.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from shoal_workers.contract.base import Frozen, whole

MAX_WEBHOOKS = 8
"""Largest number of webhooks of one job."""
SECRET_VARIABLE = "SHOAL_WEBHOOK_SECRET_"
"""Prefix of the service's environment variables that may hold the secret of a webhook."""
_WEBHOOK_SECRET = re.compile(rf"env:{SECRET_VARIABLE}[A-Z0-9_]{{1,64}}|file:[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")
_EVENT_PATTERN = re.compile(r"\*|[a-z_]+(?:\.(?:\*|[a-z_]+))?")
_WEBHOOK_URL = whole(r"apprise:|[hH][tT][tT][pP][sS]?://[^\s@/?#\\]+([/?#][!-~]*)?")
APPRISE = "apprise:"
"""The `url` of a webhook for mail or chat. Its secret is then the URL of the account or chat, as apprise writes it."""
Alerts = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=500)], ...], Field(max_length=8)]
"""Conditions over metrics. The control plane reads them: it has the language (`core/where`)."""
EventPattern = Annotated[str, Field(max_length=64, json_schema_extra={"pattern": whole(_EVENT_PATTERN.pattern)})]


def is_reference(secret: str) -> bool:
    """Return whether the text has the form that names a secret of the service."""
    return _WEBHOOK_SECRET.fullmatch(secret) is not None


class WebhookSpec(Frozen):
    """A receiver of events over HTTP."""

    url: str = Field(max_length=2048, json_schema_extra={"pattern": _WEBHOOK_URL})
    """Address of the receiver, http or https, without a user name and a password. Redirects are not followed. Or
    `apprise:`, for mail and chat: `secret` then names the apprise URL."""
    events: tuple[EventPattern, ...] = Field(("job.state", "incident.*", "alert.*"), min_length=1, max_length=64)
    """Types of events (docs/reference/events.md); `incident.*` is every type that begins so, `*` every type."""
    secret: str = Field(max_length=96, json_schema_extra={"pattern": whole(_WEBHOOK_SECRET.pattern)})
    """Where the service finds the secret that signs, or the apprise URL: `env:SHOAL_WEBHOOK_SECRET_NAME`, an
    environment variable of the service, or `file:NAME`, a file in its `webhook_secrets_dir`."""

    @property
    def receiver(self) -> str:
        """Scheme, host and port of the URL, without its path, which may contain a token. For apprise:
        `apprise:` and the name of the secret."""
        if self.is_apprise:
            return f"{APPRISE}{self.secret}"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def is_apprise(self) -> bool:
        return self.url == APPRISE

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if url == APPRISE:
            return url
        try:
            parts = urlsplit(url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError(
                "is not a valid URL of a receiver: use http:// or https:// with a host, and no spaces; or apprise: for "
                "mail and chat, with the name of a secret that is the apprise URL."
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError("has a user name or a password: receivers check the signature instead.")
        return url

    @field_validator("events")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if not _EVENT_PATTERN.fullmatch(pattern):
                raise ValueError(f'{pattern!r} must be a type of event, such as "job.state", or "incident.*", or "*".')
        return patterns

    @field_validator("secret")
    @classmethod
    def _is_a_reference(cls, secret: str) -> str:
        if not is_reference(secret):
            raise ValueError(
                f"must be env:{SECRET_VARIABLE}NAME or file:NAME; it names a secret of the service and never is one."
            )
        return secret
