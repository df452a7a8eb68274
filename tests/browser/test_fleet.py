"""The page of the fleet: workers over time with the decisions, queue, projects, and what an admin does to nodes."""

from __future__ import annotations

import time

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import RUNNING, SPEC, Service
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.store import credentials, driving, submissions
from shoal_service.views import JobView
from shoal_workers.contract.checks.spec_errors import parse_spec


def add(written: Service, name: str, now: float, **more: object) -> JobView:
    spec = parse_spec({**SPEC, "name": name, **more})
    return written.store.writing(submissions.create)(spec, idempotency_key=None, now=now)[0]


@pytest.fixture
def jobs(written: Service) -> list[JobView]:
    """One that has given its workers to another one, which grew, and one that waits."""
    now = time.time() - 600
    giver, receiver, waits = (
        add(written, name, now, project=project)
        for name, project in (("giver", "speech"), ("receiver", "vision"), ("waits", "speech"))
    )
    for job in (giver, receiver):
        written.store.writing(driving.begin_attempt, written.epoch)(job.id, workers=2, now=now + 60)
    written._seq[receiver.id] = 0
    written.report(receiver, RUNNING.model_copy(update={"workers": 2}))
    grant = written.store.writing(driving.set_grant, written.epoch)
    grant(receiver.id, workers=4, reason="Its workers add more tokens.", now=now + 120)
    take = written.store.writing(driving.preempt, written.epoch)
    take(giver.id, reason="Priority 5 before 0.", beneficiary=receiver.id, now=now + 180)
    return [giver, receiver, waits]


def test_the_fleet_shows_who_gave_what_to_whom_and_why(reader: Browser, written: Service, jobs: list[JobView]) -> None:
    reader.open(f"{written.url}/fleet")
    reader.until(lambda: reader.count("#timeline tr") == 2, "the lanes of the jobs that had an attempt")
    reader.until(lambda: reader.count("#decisions tr") >= 2, "the decisions")
    newest = reader.text("#decisions tr:first-child")
    assert "giver" in newest and "2 \u2192 0" in newest and "receiver" in newest and "Priority 5 before 0." in newest
    assert "Its workers add more tokens." in reader.text("#decisions")
    reader.sees("#queue", "waits")
    reader.until(lambda: reader.count("#projects .stripe") == 2, "the worker-seconds of both projects")
    assert {"speech", "vision"} <= set(reader.text("#projects td.title").split())
    for width in (420, 1024, 1400, 2560):
        for scheme in ("light", "dark"):
            reader.look(width=width, scheme=scheme)
            assert reader.run("document.documentElement.scrollWidth") <= width
    assert reader.complaints() == []


def test_a_node_is_cordoned_and_drained_and_a_window_planned_with_the_keyboard(
    reader: Browser, written: Service
) -> None:
    reader.open(f"{written.url}/fleet")
    reader.until(lambda: reader.count("button[aria-label^=Cordon]"), "the buttons of an admin")
    reader.run("(document.querySelector('button[aria-label^=Cordon]').focus(), 1)")
    reader.press("\ue007")
    reader.sees("#dialog-words", "No new worker is placed there.")
    reader.click("#confirm")
    reader.until(lambda: reader.count("button[aria-label^=Uncordon]"), "the node is cordoned")
    reader.sees("#nodes", "maintenance")
    with written.client as client:
        [node] = client.nodes()
        assert node.cordon is not None and node.cordon.reason == "maintenance"
    reader.click("button[aria-label^=Drain]")
    reader.click("#confirm")
    reader.until(lambda: reader.count("button[aria-label^=Undo]"), "the node is drained")
    reader.click("#plan")
    reader.click("#confirm")
    reader.sees("#dialog-error", "Say when it begins")
    begins, ends = "2031-01-01T08:00", "2031-01-01T09:00"
    for field, value in (("begins", begins), ("ends", ends)):
        reader.run(f"(document.querySelector('#window-{field}').value = '{value}', 1)")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#windows tr") == 1, "the window")
    reader.click("#windows button")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#windows tr") == 0, "the window is cancelled")
    assert reader.complaints() == []


def test_a_viewer_sees_the_fleet_and_no_button_that_changes_it(
    stranger: Browser, written: Service, jobs: list[JobView]
) -> None:
    request = TokenRequest(name="carol", role=Role.VIEWER)
    made = written.store.writing(credentials.create_token)(request, by="test", now=time.time())
    stranger.open(f"{written.url}/login")
    stranger.fill("#token", made.token)
    stranger.press("\ue007")
    stranger.until(lambda: stranger.run("location.pathname") != "/login", "logged in")
    stranger.complaints()  # the login page has asked who is logged in
    stranger.open(f"{written.url}/fleet")
    stranger.until(lambda: stranger.count("#timeline tr") == 2 and stranger.count("#nodes .node"), "the fleet")
    stranger.until(lambda: not stranger.count("#of-windows[hidden]"), "the windows")
    assert stranger.count("#nodes button") == 0 and stranger.count("#plan[hidden]") == 1
    stranger.open(f"{written.url}/sweeps")
    stranger.until(lambda: stranger.count("#new[hidden]"), "no sweep is started by a viewer")
    assert stranger.complaints() == []
