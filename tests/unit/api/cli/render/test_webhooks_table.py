"""The state of the delivery of webhooks on the terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from shoal_api.cli.render.webhooks_table import webhooks_table
from shoal_service.views import WebhookView


def _shown(*hooks: WebhookView) -> list[str]:
    console = Console(file=StringIO(), width=200)
    console.print(webhooks_table(hooks, 100.0))
    assert isinstance(console.file, StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_each_hook_has_a_line_with_what_it_waits_for() -> None:
    quiet = WebhookView(hook="service/ops", job_id=None, receiver="https://a", events=("job.*",))
    good = quiet.model_copy(update={"delivered": 7, "delivered_at": 88.0})
    bad = WebhookView(
        hook="job/0",
        job_id="job-1",
        receiver="https://b",
        events=("job.state", "incident.*"),
        gave_up=2,
        failing=1,
        waiting_since=40.0,
        next_at=110.0,
        error="has answered 500",
    )
    assert _shown(quiet, good, bad)[1:] == [
        "service/ops all https://a job.* 0 0 nothing sent yet",
        "service/ops all https://a job.* 7 0 last 12 s ago",
        "job/0 job-1 https://b job.state, incident.* 0 2 waits for 60 s: has answered 500, next attempt in 10 s",
    ]


def test_without_hooks_the_way_to_set_one_is_named() -> None:
    assert _shown() == ["no webhook; docs/webhooks.md says how to set one"]
