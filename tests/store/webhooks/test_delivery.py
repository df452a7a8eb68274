"""Delivery to a real receiver over HTTP, from both databases: order, signatures, retries, the receiver of the docs."""

import base64
import hashlib
import hmac
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.webhooks import HANG, SECRET, SECRET_NAME, Message, Receiver, config_of, delivering
from shoal_service.control.webhooks import SlotLimits
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.core.webhooks import UNRESTRICTED, ServiceWebhook, WebhookRules
from shoal_service.reports import SupervisorReports
from shoal_service.store import Lease, Store, driving, histories, reporting
from shoal_service.views import JobStatus
from shoal_workers.contract import JobState

Submit = Callable[..., str]
Reach = Callable[..., Any]
RESTARTED = "supervisor.restarted"


def hook_to(receiver: Receiver, *events: str, secret: str = SECRET_NAME) -> dict[str, Any]:
    return {"url": receiver.url, "events": list(events or (RESTARTED,)), "secret": secret}


def record(store: Store, lease: Lease, job_id: str, *numbers: int) -> None:
    for number in numbers:
        event = SupervisorRestarted(found=number, of=number)
        store.writing(driving.record_event, lease.epoch)(job_id, event, now=time.time())


def numbers_in(messages: list[Message]) -> list[int]:
    return [message.body["data"]["found"] for message in messages]


def is_signed(message: Message, key: bytes) -> bool:
    """As a receiver checks it: written from the documentation, without the code that signs."""
    signed = f"{message.headers['webhook-id']}.{message.headers['webhook-timestamp']}.".encode() + message.raw
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return hmac.compare_digest(expected, message.headers["webhook-signature"])


def test_selected_events_arrive_once_in_order_and_signed(
    store: Store, owned: Lease, submit: Submit, reach: Reach, reach_count: Callable[..., None]
) -> None:
    with Receiver() as receiver, delivering(store, config_of(), lambda: owned) as tallies:
        job_id = submit(now=time.time(), webhooks=[hook_to(receiver, "job.*", RESTARTED)])
        store.writing(driving.begin_attempt, owned.epoch)(job_id, workers=1, now=time.time())
        record(store, owned, job_id, 1, 2, 3)
        messages = receiver.wait(5)
        assert receiver.types() == ["job.created", "job.state", *([RESTARTED] * 3)]
        assert receiver.ids() == [f"{job_id}_{seq}" for seq in range(1, 6)]
        assert all(is_signed(message, SECRET.encode()) for message in messages)
        assert not any(is_signed(message, b"another-secret-of-16") for message in messages)
        assert abs(int(messages[0].headers["webhook-timestamp"]) - time.time()) < 60
        body = messages[1].body
        assert body["job"] == {"id": job_id, "name": "fish", "project": "default", "user": "default"}
        event = store.reading(histories.read_events)(job_id)[1].model_dump(mode="json")
        assert body == {"id": f"{job_id}_2", "job": body["job"], **event}
        view = reach(job_id, lambda view: view.delivered == 5)
        assert (view.hook, view.waiting_since, view.error) == ("job/0", None, "")
        reach_count(tallies, "jobs", "delivered", 5)
    assert tallies.outcomes.values()["jobs", "delivered"] == 5
    assert tallies.seconds.values()[("jobs",)].count == 5


def test_an_alert_arrives_once_and_the_steps_after_it_send_nothing(store: Store, owned: Lease, submit: Submit) -> None:
    with Receiver() as receiver, delivering(store, config_of(), lambda: owned):
        job_id = submit(alerts=["loss > 10"], webhooks=[hook_to(receiver, "alert.*", RESTARTED)])
        store.writing(driving.begin_attempt, owned.epoch)(job_id, workers=1, now=time.time())
        for seq, loss in enumerate([2.0, 11.0, 12.0], start=1):
            rest = {"grad_norm": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "step_s": 1.0, "world_size": 1, "generation": 1}
            reports = SupervisorReports(
                attempt=1,
                seq=seq,
                status=JobStatus(state=JobState.RUNNING, attempt=1, step=seq, loss=loss),
                series=(SeriesPoint(step=seq, at=time.time(), loss=loss, **rest),),
            )
            store.writing(reporting.apply, owned.epoch)(job_id, reports, now=time.time())
        record(store, owned, job_id, 1)
        alert, _ = receiver.wait(2)
        assert receiver.types() == ["alert.raised", RESTARTED]
        assert alert.body["data"] == {"condition": "loss > 10", "step": 2, "values": {"loss": 11.0}}


def test_an_event_is_repeated_with_its_id_until_the_receiver_accepts_it_and_the_later_ones_wait(
    store: Store, owned: Lease, submit: Submit
) -> None:
    with Receiver(500, 503, 204) as receiver, delivering(store, config_of(), lambda: owned) as tallies:
        job_id = submit(webhooks=[hook_to(receiver)])
        record(store, owned, job_id, 1, 2)
        messages = receiver.wait(4)
        assert numbers_in(messages) == [1, 1, 1, 2]
        assert len(set(receiver.ids())) == 2
        assert messages[0].raw == messages[2].raw
    assert tallies.outcomes.values()["jobs", "failed"] == 2


def test_a_receiver_that_hangs_delays_only_itself(store: Store, owned: Lease, submit: Submit, reach: Reach) -> None:
    config = replace(config_of(answer_s=1.0), slots=SlotLimits(per_receiver=1, healthy=2, failing=1))
    with Receiver(*[HANG] * 1000) as slow, Receiver() as fast, delivering(store, config, lambda: owned):
        stuck = [submit(webhooks=[hook_to(slow)]) for _ in range(6)]
        for job_id in stuck:
            record(store, owned, job_id, 1)
        slow.wait(1)
        good = submit(webhooks=[hook_to(fast)])
        record(store, owned, good, *range(20))
        messages = fast.wait_until(lambda messages: len({message.id for message in messages}) == 20)
        assert sorted(numbers_in(messages)) == numbers_in(messages)
        view = reach(stuck[0], lambda view: view.failing == 1)
        assert view.error == "has not answered within 1 s"
        assert view.waiting_since is not None and view.next_at is not None


def test_a_receiver_that_goes_away_and_comes_back_gets_everything(
    store: Store, owned: Lease, submit: Submit, reach: Reach
) -> None:
    receiver = Receiver()
    job_id = submit(webhooks=[hook_to(receiver)])
    with delivering(store, config_of(), lambda: owned):
        record(store, owned, job_id, 1)
        receiver.wait(1)
        reach(job_id, lambda view: view.delivered == 1)
        receiver.close()
        record(store, owned, job_id, 2, 3)
        view = reach(job_id, lambda view: view.failing == 1)
        assert view.error.startswith("cannot be reached")
        with Receiver(port=receiver.port) as again:
            assert numbers_in(again.wait(2)) == [2, 3]
            reach(job_id, lambda view: view.delivered == 3 and view.failing == 0)


def test_after_a_restart_of_the_service_delivery_goes_on_where_it_was(
    store: Store, store_url: str, owned: Lease, submit: Submit, reach: Reach
) -> None:
    with Receiver(204, 204, *[500] * 1000) as receiver:
        job_id = submit(webhooks=[hook_to(receiver)])
        with delivering(store, config_of(longest_s=0.05), lambda: owned):
            record(store, owned, job_id, *range(1, 6))
            reach(job_id, lambda view: view.delivered == 2 and view.failing == 1)
        before = receiver.ids()
        port = receiver.port
    assert set(before) == {f"{job_id}_{seq}" for seq in (2, 3, 4)}
    with Receiver(port=port) as receiver:
        restarted = Store.open(store_url)
        with delivering(restarted, config_of(), lambda: owned):
            assert numbers_in(receiver.wait(3)) == [3, 4, 5]
        restarted.close()


def test_only_the_owner_of_the_lease_delivers_and_the_next_one_repeats_what_was_not_noted(
    store: Store, owned: Lease, submit: Submit, reach: Reach
) -> None:
    with Receiver(HANG) as receiver:
        job_id = submit(webhooks=[hook_to(receiver)])
        record(store, owned, job_id, 1)
        with delivering(store, config_of(answer_s=0.3), lambda: owned):
            receiver.wait(1)
            store.release_lease("owner-1")
            successor = store.acquire_lease("owner-2", ttl_s=3600.0, now=time.time())
            assert successor is not None and successor.epoch > owned.epoch
            with delivering(store, config_of(), lambda: successor):
                messages = receiver.wait(2)
                reach(job_id, lambda view: view.delivered == 1)
        assert messages[0].id == messages[1].id
        expired = replace(successor, expires_at=time.time() - 1)
        with delivering(store, config_of(), lambda: expired), Receiver() as control:
            other = submit(webhooks=[hook_to(control)])
            record(store, successor, job_id, 2)
            record(store, successor, other, 1)
            with delivering(store, config_of(), lambda: successor):
                control.wait(1)
                reach(job_id, lambda view: view.delivered == 2)
        assert numbers_in(receiver.messages) == [1, 1, 2], "the process with the expired lease has sent nothing"


def test_attempts_end_with_an_event_and_a_count_and_later_events_are_delivered(
    store: Store, owned: Lease, submit: Submit, reach: Reach, reach_count: Callable[..., None]
) -> None:
    with Receiver(*[500] * 1000) as receiver:
        job_id = submit(webhooks=[hook_to(receiver, "*")])
        record(store, owned, job_id, 1, 2)  # before the first attempt: one event tells of all three
        with delivering(store, config_of(give_up_s=0.4), lambda: owned) as tallies:
            reach(job_id, lambda view: view.gave_up == 3 and view.failing == 0)
            reach_count(tallies, "jobs", "gave_up", 3)
        assert tallies.outcomes.values()["jobs", "gave_up"] == 3
        port = receiver.port
    events = store.reading(histories.read_events)(job_id)
    [gave_up] = [event for event in events if event.type == "webhook.gave_up"]
    assert gave_up.data["num_events"] == 3
    assert (gave_up.data["first_seq"], gave_up.data["last_seq"]) == (1, 3)
    assert gave_up.data["failing_s"] >= 0.4
    assert gave_up.message.endswith(f"http://127.0.0.1:{port} has answered 500")
    with Receiver(port=port) as receiver, delivering(store, config_of(), lambda: owned):
        record(store, owned, job_id, 4)
        assert [message.body["type"] for message in receiver.wait(1)] == [RESTARTED], "not the event about itself"
        reach(job_id, lambda view: view.delivered == 1 and view.gave_up == 3)


def test_redirects_are_not_followed(store: Store, owned: Lease, submit: Submit, reach: Reach) -> None:
    with Receiver(302, 307, 308, 204) as receiver, delivering(store, config_of(), lambda: owned):
        job_id = submit(webhooks=[hook_to(receiver)])
        record(store, owned, job_id, 1)
        messages = receiver.wait(4)
        assert {message.path for message in messages} == {"/hook"}


def test_a_secret_is_read_for_each_message_and_is_neither_stored_nor_logged(
    store: Store, owned: Lease, submit: Submit, reach: Reach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = b"of-the-receiver-" * 2
    secret = "whsec_" + base64.b64encode(key).decode()
    with Receiver() as receiver, delivering(store, config_of(directory=tmp_path), lambda: owned):
        job_id = submit(webhooks=[hook_to(receiver, secret="file:team-a")])
        record(store, owned, job_id, 1)
        view = reach(job_id, lambda view: view.failing == 1)
        assert view.error.startswith("was not called: secret file:team-a: the file in webhook_secrets_dir")
        assert receiver.messages == []
        (tmp_path / "team-a").write_text(secret + "\n")
        [message] = receiver.wait(1)
        assert is_signed(message, key)
        reach(job_id, lambda view: view.delivered == 1)
    assert "webhooks.failed" in caplog.text
    assert secret not in caplog.text and message.headers["webhook-signature"] not in caplog.text
    for path in tmp_path.glob("shoal.db*"):
        assert secret.encode() not in path.read_bytes()


def test_a_hook_of_the_settings_gets_the_events_of_all_jobs_from_then_on(
    store: Store, owned: Lease, submit: Submit, reach: Reach, reach_count: Callable[..., None]
) -> None:
    old = submit(now=time.time())
    record(store, owned, old, 1)
    with Receiver() as receiver:
        hook = ServiceWebhook.model_validate({"name": "ops", **hook_to(receiver)})
        with delivering(store, config_of(hook), lambda: owned) as tallies:
            view = reach(None, lambda view: view is not None)
            assert (view.hook, view.receiver, view.events) == ("service/ops", hook.receiver, (RESTARTED,))
            record(store, owned, old, 2)
            new = submit(now=time.time())
            record(store, owned, new, 3)
            messages = receiver.wait(2)
            assert {message.id: message.body["data"]["found"] for message in messages} == {f"{old}_3": 2, f"{new}_2": 3}
            reach(None, lambda view: view.delivered == 2)
            reach_count(tallies, "ops", "delivered", 2)
        assert tallies.outcomes.values()["ops", "delivered"] == 2
        with delivering(store, config_of(), lambda: owned):
            reach(None, lambda view: view is None)
        with delivering(store, config_of(hook), lambda: owned):
            assert reach(None, lambda view: view is not None).delivered == 0, "a hook that was away begins anew"
            record(store, owned, old, 4)
            assert numbers_in(receiver.wait(3))[2] == 4


def test_a_hook_of_a_spec_reaches_no_closed_address(store: Store, owned: Lease, submit: Submit, reach: Reach) -> None:
    """The name resolves to loopback only when it is called."""
    rules = WebhookRules(secrets={"*": ("*",)})
    with Receiver() as receiver:
        with delivering(store, config_of(rules=rules), lambda: owned):
            job_id = submit(webhooks=[{**hook_to(receiver), "url": receiver.url.replace("127.0.0.1", "localhost")}])
            record(store, owned, job_id, 1)
            error = reach(job_id, lambda view: view is not None and view.failing == 1).error
            assert "localhost has no address that webhooks of specs may reach" in error
        assert receiver.messages == []
        allowed = replace(rules, hosts=frozenset({"localhost"}))
        with delivering(store, config_of(rules=allowed), lambda: owned):
            [message] = receiver.wait(1)
            assert message.headers["Host"] == f"localhost:{receiver.port}"


def test_a_hook_of_the_settings_has_no_rules(store: Store, owned: Lease, submit: Submit) -> None:
    with Receiver() as receiver:
        own = ServiceWebhook(name="ops", **hook_to(receiver))
        with delivering(store, config_of(own, rules=WebhookRules()), lambda: owned):
            record(store, owned, submit(), 1)
            assert numbers_in(receiver.wait(1)) == [1]


def test_a_redirect_leads_nowhere(store: Store, owned: Lease, submit: Submit, reach: Reach) -> None:
    rules = WebhookRules.read("127.0.0.1", {"*": ("*",)})
    with Receiver(*[302] * 50) as receiver, delivering(store, config_of(rules=rules), lambda: owned):
        job_id = submit(webhooks=[hook_to(receiver)])
        record(store, owned, job_id, 1)
        reach(job_id, lambda view: view is not None and "redirects are not followed" in (view.error or ""))
        assert {message.path for message in receiver.messages} == {"/hook"}


def test_a_secret_that_was_taken_from_the_project_signs_nothing(
    store: Store, owned: Lease, submit: Submit, reach: Reach
) -> None:
    rules = replace(UNRESTRICTED, secrets={"other": ("*",)})
    with Receiver() as receiver, delivering(store, config_of(rules=rules), lambda: owned):
        job_id = submit(webhooks=[hook_to(receiver)])
        record(store, owned, job_id, 1)
        error = reach(job_id, lambda view: view is not None and view.failing == 1).error
        assert "was not called: the project 'default' may not use the secret" in error
        assert receiver.messages == []


PAGE = Path(__file__).resolve().parents[3] / "docs" / "webhooks.md"
OTHER = "the secret of someone else"


@pytest.fixture(params=[SECRET, OTHER])
def receiver(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The URL and the secret of a process that runs the page's receiver."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"SECRET": request.param, "PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/", request.param
    finally:
        process.kill()
        process.wait()


def test_the_receiver_of_the_page_accepts_only_its_own_secret(
    store: Store,
    owned: Lease,
    submit: Callable[..., str],
    reach: Callable[..., Any],
    receiver: tuple[str, str],
) -> None:
    url, secret = receiver
    with delivering(store, config_of(), lambda: owned):
        job_id = submit(now=time.time(), webhooks=[{"url": url, "events": ["job.created"], "secret": SECRET_NAME}])
        if secret == SECRET:
            assert reach(job_id, lambda view: view.delivered == 1).gave_up == 0
        else:
            assert reach(job_id, lambda view: view.error == "has answered 401").delivered == 0
