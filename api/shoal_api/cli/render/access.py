"""The tables of `shoal token list` and `shoal audit`. Called by cli/commands/access.py."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rich.table import Table

from shoal_api.cli.render.terminal import new_table
from shoal_service.access_views import AuditEvent, TokenView


def is_valid(token: TokenView, now: float) -> bool:
    return token.revoked_at is None and (token.expires_at is None or now < token.expires_at)


def tokens_table(tokens: Sequence[TokenView], now: float) -> Table:
    """Return a table with one row per token, in the given order."""
    made = new_table("id", "name", "role", "for", "ends", "last use", "made by")
    for one in tokens:
        made.add_row(
            one.id,
            one.name,
            one.role,
            _scope(one),
            _end(one, now),
            "never" if one.last_used_at is None else _time(one.last_used_at),
            one.created_by,
        )
    return made


def audit_table(events: Sequence[AuditEvent]) -> Table:
    """Return a table with one row per event, in the given order."""
    made = new_table("time", "who", "role", "token", "from", "what", "job", "outcome")
    for one in events:
        made.add_row(
            _time(one.at), one.actor, one.role, one.token_id, one.address, one.operation, one.job_id, one.outcome
        )
    return made


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
