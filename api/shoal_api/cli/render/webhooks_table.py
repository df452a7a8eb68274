"""The state of the delivery of webhooks as a table. Pure: takes views, returns what rich prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.tables import new_table
from shoal_service.core.quantities import duration_text
from shoal_service.views import WebhookView


def webhooks_table(hooks: Sequence[WebhookView], now: float) -> Table | Text:
    """One line per hook, at the time `now`."""
    if not hooks:
        return Text("no webhook; docs/webhooks.md says how to set one", style="dim")
    table = new_table("hook", "job", "receiver", "events", ">delivered", ">given up", "state")
    for hook in hooks:
        counts = (str(hook.delivered), str(hook.gave_up))
        where = (hook.hook, hook.job_id or "all", hook.receiver)
        table.add_row(*where, ", ".join(hook.events), *counts, _state(hook, now))
    return table


def _state(hook: WebhookView, now: float) -> Text:
    if hook.waiting_since is None:
        last = "nothing sent yet" if hook.delivered_at is None else f"last {duration_text(now - hook.delivered_at)} ago"
        return Text(last, style="dim" if hook.delivered_at is None else "green")
    waits = f"waits for {duration_text(now - hook.waiting_since)}"
    due = "" if hook.next_at is None else f", next attempt in {duration_text(max(0.0, hook.next_at - now))}"
    return Text(f"{waits}: {hook.error}{due}", style="red")
