"""Events to mail and chat through apprise, shown with its json:// plug-in and a real receiver."""

import importlib.util
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.webhooks import Receiver, config_of, delivering
from shoal_service.control.webhooks import check_webhooks
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.core.webhooks import UNRESTRICTED, ServiceWebhook
from shoal_service.store import Lease, Store, driving, webhook_lanes
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec

Submit = Callable[..., str]
Reach = Callable[..., Any]
RESTARTED = "supervisor.restarted"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of apprise's plug-ins
OF_JOB = {"url": "apprise:", "events": [RESTARTED], "secret": "file:chat"}


@pytest.fixture
def installed() -> None:
    pytest.importorskip("apprise")


def record(store: Store, lease: Lease, job_id: str, number: int) -> None:
    event = SupervisorRestarted(found=number, of=number)
    store.writing(driving.record_event, lease.epoch)(job_id, event, now=time.time())


@pytest.mark.usefixtures("installed")
def test_an_event_is_repeated_until_it_is_accepted_and_says_what_happened_in_which_job(
    store: Store,
    owned: Lease,
    submit: Submit,
    reach: Reach,
    reach_count: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with Receiver(500) as receiver:
        (tmp_path / "chat").write_text(f"json://user:s3cr3t-pass@127.0.0.1:{receiver.port}/t0ken\n")
        (tmp_path / "mail").write_text(f"json://127.0.0.1:{receiver.port}/all")
        everywhere = ServiceWebhook(name="mail", url="apprise:", events=("supervisor.*",), secret="file:mail")
        with delivering(store, config_of(everywhere, directory=tmp_path), lambda: owned) as tallies:
            job_id = submit(webhooks=[OF_JOB])
            record(store, owned, job_id, 3)
            receiver.wait(3)  # one of the two hooks is refused once
            for hook in ("jobs", "mail"):
                reach_count(tallies, hook, "delivered", 1)
            reach(
                job_id, lambda _: all(view.delivered for view in store.reading(webhook_lanes.read_views)(job_id))
            )  # stored after it is counted
            views = store.reading(webhook_lanes.read_views)(job_id)
        [of_job] = [one for one in receiver.messages if one.path == "/t0ken"][-1:]
        title, text, type_ = (of_job.body[key] for key in ("title", "message", "type"))
        assert (title, type_) == ("fish: supervisor.restarted", "warning")
        assert text.startswith("supervisor restarted: reattached to 3 of 3 workers")
        assert text.endswith(f"event {job_id}_2"), "the id by which a repeated message is recognised"
        assert {one.path for one in receiver.messages} == {"/t0ken", "/all"}
    assert sum(tallies.outcomes.values()[hook, "delivered"] for hook in ("jobs", "mail")) == 2
    assert [(view.receiver, view.delivered) for view in views] == [("apprise:file:mail", 1), ("apprise:file:chat", 1)]
    shown = " ".join(
        [*(str(view) for view in views), *(f"{one.getMessage()} {one.__dict__}" for one in caplog.records)]
    )
    assert "t0ken" not in shown and "s3cr3t-pass" not in shown


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("secret", "error"),
    [
        (None, "was not called: secret file:chat: the file in webhook_secrets_dir: No such file or directory"),
        ("nonsense", "was not called: the secret is not a URL that apprise knows"),
        (
            "json://a json://b",
            "was not called: secret file:chat: it is not one URL; a hook has one, so use more hooks",
        ),
        ("json://127.0.0.1:1/t0ken", "has not accepted it"),
    ],
)
def test_what_cannot_be_sent_is_said_without_the_url(
    store: Store, owned: Lease, submit: Submit, reach: Reach, tmp_path: Path, secret: str | None, error: str
) -> None:
    if secret is not None:
        (tmp_path / "chat").write_text(secret)
    with delivering(store, config_of(directory=tmp_path), lambda: owned):
        job_id = submit(webhooks=[OF_JOB])
        record(store, owned, job_id, 1)
        assert reach(job_id, lambda view: view.failing == 1).error == error


def test_without_apprise_a_spec_that_needs_it_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = parse_spec({"task": "m:T", "stop": {"steps": 1}, "webhooks": [OF_JOB]})
    with pytest.raises(SpecError, match=r"pip install 'shoal\[apprise\]'"):
        check_webhooks(spec, UNRESTRICTED)
