"""The tables of `shoal token list` and `shoal audit`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rich.console import RenderableType

from shoal_api.cli.render.terminal import make_table
from shoal_service.access_views import AuditEvent, TokenView


def is_valid(token: TokenView, now: float) -> bool:
    return token.revoked_at is None and (token.expires_at is None or now < token.expires_at)


def tokens_table(tokens: Sequence[TokenView], now: float) -> RenderableType:
    """Return a table with one row per token, in the given order."""
    return make_table(
        ("id", "name", "role", "for", "ends", "last use", "made by"),
        [
            (
                token.id,
                token.name,
                token.role,
                _scope(token),
                _end(token, now),
                "never" if token.last_used_at is None else _time(token.last_used_at),
                token.created_by,
            )
            for token in tokens
        ],
    )


def audit_table(events: Sequence[AuditEvent]) -> RenderableType:
    """Return a table with one row per event, in the given order."""
    return make_table(
        ("time", "who", "role", "token", "from", "what", "job", "outcome"),
        [
            (
                _time(event.at),
                event.actor,
                event.role,
                event.token_id,
                event.address,
                event.operation,
                event.job_id,
                event.outcome,
            )
            for event in events
        ],
    )


def _scope(token: TokenView) -> str:
    if token.cluster is not None:
        return f"cluster {token.cluster}"
    return "all" if token.projects is None else ", ".join(token.projects)


def _end(token: TokenView, now: float) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is None:
        return "never"
    return "expired" if token.expires_at <= now else _time(token.expires_at)


def _time(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
