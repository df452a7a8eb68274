"""A control plane that dies by SIGKILL while a receiver refuses events: the next one delivers all of them, in order."""

from __future__ import annotations

from typing import Any

import pytest

from kit.webhooks import SECRET, Receiver
from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client


@pytest.mark.matrix
def test_no_event_is_lost_when_the_control_plane_is_killed(submit: Any, shoal_server: Any, client: Client) -> None:
    secrets = shoal_server.state_dir / "webhook-secrets"
    secrets.mkdir(exist_ok=True)
    (secrets / "team").write_text(SECRET)
    with Receiver(204, *[503] * 10_000) as receiver:
        hook = {"url": receiver.url, "events": ["*"], "secret": "file:team"}
        run = submit(steps=10, workers=1, strikes=holds(5), webhooks=[hook])
        run.wait_at("step-5-0")
        receiver.wait(2)  # one that was accepted, one that was not
        try:
            shoal_server.kill()
            receiver.accept_all()
            run.release("step-5-0")
        finally:
            shoal_server.start().wait_for_cluster()
        run.finish()
        expected = [f"{run.id}_{event.seq}" for event in client.events(run.id)]
        receiver.wait_until(lambda messages: {message.id for message in messages} >= set(expected))
        assert list(dict.fromkeys(receiver.ids())) == expected, "each event, in order; some of them again"
        [hook_view] = client.webhooks(run.id)
        assert (hook_view.gave_up, hook_view.receiver) == (0, f"http://127.0.0.1:{receiver.port}")
