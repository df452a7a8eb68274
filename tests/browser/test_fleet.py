"""The page of the fleet: workers over time with who gave what to whom, queue, quotas, goodput, and what an admin does
to nodes; what each role may do; a worker and a node that are killed while it is open.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.chromium import Browser
from kit.processes.ray_nodes import Nodes
from kit.processes.server import Server
from kit.store_calls import set_queue
from kit.worlds.tiny_jobs import Submit
from kit.worlds.written_service import RUNNING, SPEC, Service
from shoal_api.client import Client
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.core.scheduling.market import Wait
from shoal_service.fleet_views import ProjectRules
from shoal_service.reports import SupervisorReports
from shoal_service.store import access, driving, queueing, reporting, submissions
from shoal_service.views import JobView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, IncidentCause, JobState

MANY_STEPS = 100_000
NODE = "127.0.0.9"
LANE = 1000
"""The width of a lane of the timeline."""


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
    take(giver.id, reason="Priority 5 before 0.", beneficiary=receiver.id, flows=((receiver.id, 1),), now=now + 180)
    return [giver, receiver, waits]


def _ran(written: Service, name: str, begin: float, end: float) -> JobView:
    """A job that had two workers from one time to the other."""
    job = add(written, name, begin)
    written.store.writing(driving.begin_attempt, written.epoch)(job.id, workers=2, now=begin)
    status = RUNNING.model_copy(update={"workers": 2, "desired_workers": 2})
    done = AttemptEnd(reason=EndReason.FINISHED, message="done", step=100)
    apply = written.store.writing(reporting.apply, written.epoch)
    apply(job.id, SupervisorReports(attempt=1, seq=1, status=status), now=begin)
    apply(job.id, SupervisorReports(attempt=1, seq=2, status=status, end=done), now=end)
    return job


def _choose(reader: Browser, hours: str) -> None:
    field = "document.querySelector('#hours')"
    reader.run(f"({field}.value = '{hours}', {field}.dispatchEvent(new Event('change')), 1)")


def test_the_fleet_shows_who_gave_what_to_whom_and_why(reader: Browser, written: Service, jobs: list[JobView]) -> None:
    reader.open(f"{written.url}/fleet")
    reader.until(lambda: reader.count("#timeline tr") == 2, "the lanes of the jobs that had an attempt")
    reader.until(lambda: reader.count("#decisions tr") >= 4, "the changes")
    newest = reader.text("#decisions tr:first-child")
    assert "giver" in newest and "preempted" in newest and "2 \u2192 0" in newest and "Priority 5 before 0." in newest
    assert "1 to receiver; freed 1" in newest
    grown = reader.text("#decisions tr:nth-child(2)")
    assert "grew" in grown and "2 free workers" in grown and "Its workers add more tokens." in grown
    for width in (420, 1024, 1400, 2560):
        for scheme in ("light", "dark"):
            reader.look(width=width, scheme=scheme)
            assert reader.run("document.documentElement.scrollWidth") <= width
    assert reader.complaints() == []


def test_the_range_fits_what_happened_lately_until_one_is_chosen_which_the_address_keeps(
    reader: Browser, written: Service
) -> None:
    now = time.time()
    _ran(written, "of-a-week", now - 4 * 86400, now - 3 * 86400)
    short = _ran(written, "short", now - 420, now - 60)
    widths = f"[...document.querySelectorAll('[data-id={short.id}] rect')].map((one) => one.width.baseVal.value)"
    width = f"Math.max(...{widths})"
    reader.open(f"{written.url}/fleet")
    reader.sees("#timeline-words", "The last 15 min: 1 job")
    assert reader.run(width) > LANE / 5, "six minutes of a quarter of an hour"
    _choose(reader, "168")
    reader.sees("#timeline-words", "The last 7 d: 2 jobs")
    assert reader.run(width) < LANE / 100
    assert reader.run("location.search") == "?hours=168"
    reader.open(reader.driver.current_url)
    reader.sees("#timeline-words", "The last 7 d")
    assert reader.run("document.querySelector('#hours').value") == "168"
    _choose(reader, "")
    reader.sees("#timeline-words", "The last 15 min")
    assert reader.run("location.search") == ""
    assert reader.complaints() == []


def test_the_queue_says_place_reason_holders_and_expected_start(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    _, receiver, waits = jobs
    now = time.time()
    reason = "Needs 2 workers of 1 CPU each; 0 can be had."
    set_queue(written.store, [Wait(waits.id, reason, 1, (receiver.id,), now + 600)], epoch=written.epoch, now=now)
    held = HeldBack(receiver.id, 4, 6, GrowthLimit.NO_ROOM, "The nodes have no room.")
    written.store.writing(queueing.save_growth, written.epoch)([held], {receiver.id: 1}, now=now)
    reader.open(f"{written.url}/fleet")
    reader.sees("#queue", reason)
    row = reader.text(f"#queue [data-id={waits.id}]")
    assert row.split()[:2] == ["1", "waits"] and "speech, default" in row
    reader.sees("#queue a", "receiver")  # its name, which comes after the row
    assert "in 9." in row or "in 10 min" in row, row
    assert reader.run(f"document.querySelector('#queue a[href$=\"{receiver.id}\"]') !== null")
    reader.sees("#held", "4 of 6")
    reader.sees("#held", "The nodes have no room.")


def test_goodput_of_each_project_is_drawn_by_cause_over_the_chosen_time(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    receiver, now = jobs[1], time.time()
    seconds = {Category.PRODUCTIVE: 900.0, Category.RECOVERING: 60.0, Category.QUEUED: 240.0}
    goodput = Goodput(
        seconds=seconds, recovering={IncidentCause.NODE_DIED: 60.0}, total=1200.0, ratio=0.75, at=now, max_step=10
    )
    written.report(receiver, RUNNING.model_copy(update={"workers": 4, "goodput": goodput}))
    reader.open(f"{written.url}/fleet?hours=24")
    reader.until(lambda: reader.count("#spent [data-project=vision] svg.tall rect") >= 2, "the bars of vision")
    shown = reader.text("#spent [data-project=vision]")
    # of 960 s with workers; the time in the queue is no use
    assert "75 %" in shown and "productive 93.8 %, recovering 6.3 % (node died 60 s); queued 4 min" in shown, shown
    assert "recovering" in reader.text("#causes") and "queued" not in reader.text("#causes")
    wide = reader.count("#spent [data-project=vision] svg.tall rect")
    _choose(reader, "1")
    reader.until(lambda: reader.count("#spent [data-project=vision] svg.tall rect") > wide, "more bars in an hour")
    reader.sees("#spent-words", "A bar is 75 s")
    assert reader.complaints() == []


def test_use_by_week_and_month_is_saved_as_a_file(reader: Browser, written: Service, tmp_path: Path) -> None:
    now = time.time()
    _ran(written, "short", now - 7200, now - 3600)
    reader.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    reader.open(f"{written.url}/fleet")
    for period in ("week", "month"):
        reader.click(f"a[href*='by={period}']")
        file = tmp_path / f"usage-by-{period}.csv"
        reader.until(file.exists, file.name)
        assert file.read_text().startswith(f"project,{period},worker_hours,productive_hours,jobs\n")
    assert reader.complaints() == []


def test_quotas_are_shown_with_their_use_and_changed(reader: Browser, written: Service, jobs: list[JobView]) -> None:
    with written.client as client:
        client.set_project("vision", ProjectRules(limit=8, guaranteed=2, max_running=3))
    reader.open(f"{written.url}/fleet")
    reader.sees("#projects [data-project=vision]", "4 of 8")
    assert "1 of 3" in reader.text("#projects [data-project=vision]")
    assert reader.run("document.querySelector('#projects [data-project=vision] progress').value") == 4
    reader.click("button[aria-label='Change the quotas of vision']")
    reader.sees("#dialog-words", "No job ends.")
    reader.fill("#quota-limit", "2")
    reader.fill("#quota-guaranteed", "3")
    reader.click("#confirm")
    reader.sees("#dialog-error", "guaranteed 3 is larger than limit 2. Set limit to at least 3")
    with written.client as client:
        assert client.project("vision").limit == 8, "nothing was stored"
    reader.fill("#quota-guaranteed", "1")
    reader.click("#confirm")
    reader.sees("#projects [data-project=vision]", "4 of 2")
    with written.client as client:
        kept = client.project("vision")
    assert (kept.limit, kept.guaranteed, kept.max_running, kept.weight) == (2, 1, 3, 1.0)

    reader.click("#define")
    reader.click("#confirm")
    reader.sees("#dialog-error", "Say the name of the project.")
    reader.fill("#quota-name", "lab")
    reader.click("#confirm")
    reader.until(lambda: reader.count("button[aria-label='Delete the quotas of lab']"), "the new project")
    reader.click("button[aria-label='Delete the quotas of lab']")
    reader.click("#confirm")
    reader.until(lambda: not reader.count("#projects [data-project=lab]"), "its quotas are gone")
    expected = [one for one in reader.complaints() if "422" not in one]
    assert expected == []


def test_a_node_is_cordoned_and_drained_with_the_keyboard(reader: Browser, written: Service) -> None:
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
    reader.click("button[aria-label^=Uncordon]")
    reader.click("#confirm")
    reader.until(lambda: reader.count("button[aria-label^=Cordon]"), "the node is used again")
    reader.click("button[aria-label^=Drain]")
    reader.fill("#drain-minutes", "30")
    reader.sees("#dialog-words", "before it goes away in 30 minutes")
    reader.click("#confirm")
    reader.until(lambda: reader.count("button[aria-label^=Undo]"), "the node is drained")
    reader.sees("#nodes", "maintenance; it goes away at")
    with written.client as client:
        [node] = client.nodes()
        assert node.drain is not None and node.drain.deadline is not None
        assert node.drain.deadline - node.drain.requested_at == pytest.approx(1800.0)
    reader.click("button[aria-label^=Undo]")
    reader.click("#confirm")
    reader.until(lambda: reader.count("button[aria-label^=Drain]"), "the node is used again")
    assert reader.complaints() == []


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.ADMIN])
def test_only_an_admin_has_buttons_and_others_read_why(
    role: Role, stranger: Browser, written: Service, jobs: list[JobView]
) -> None:
    request = TokenRequest(name="carol", role=role)
    made = written.store.writing(access.create_token)(request, by="test", now=time.time())
    stranger.open(f"{written.url}/login")
    stranger.fill("#token", made.token)
    stranger.press("\ue007")
    stranger.until(lambda: stranger.run("location.pathname") != "/login", "logged in")
    stranger.complaints()  # the login page has asked who is logged in
    stranger.open(f"{written.url}/fleet")
    stranger.until(lambda: stranger.count("#timeline tr") == 2 and stranger.count("#nodes .node"), "the fleet")
    stranger.until(lambda: stranger.count("#projects tr"), "the quotas")
    buttons = stranger.count("#nodes button"), stranger.count("#projects button")
    if role is Role.ADMIN:
        assert buttons >= (2, 1) and not stranger.count("#define[hidden]")
        assert stranger.count("#cluster-role[hidden]") == stranger.count("#quota-role[hidden]") == 1
    else:
        assert buttons == (0, 0) and stranger.count("#define[hidden]") == 1
        for place in ("#cluster-role", "#quota-role"):
            assert f"you need the role admin. You are carol, with the role {role}." in stranger.text(place)
    assert stranger.complaints() == []
    stranger.open(f"{written.url}/sweeps")
    stranger.until(lambda: bool(stranger.count("#new[hidden]")) is (role is Role.VIEWER), "who starts sweeps")


@pytest.fixture
def doomed(shoal_server: Server) -> Iterator[Nodes]:
    """A node beside the session's own, for jobs that name its zone."""
    nodes = Nodes(shoal_server.state_dir, python=shoal_server.python)
    nodes.add(NODE, num_cpus=2, labels="zone=doomed")
    yield nodes
    nodes.end_added()


def test_a_page_that_is_open_follows_a_quota_the_death_of_a_worker_and_that_of_a_node(
    browser: Browser, shoal_server: Server, doomed: Nodes, submit: Submit, client: Client
) -> None:
    worker = {"selector": {"zone": "doomed"}}
    run = submit(workers=2, steps=MANY_STEPS, step_s=0.05, worker=worker, project="doomed-project")
    run.wait_for_step(3)
    browser.open(f"http://127.0.0.1:{shoal_server.port}/fleet")
    browser.run("(window.opened = 'once', 1)")
    found = f"[...document.querySelectorAll('.node')].find((one) => one.textContent.startsWith('{NODE}'))"
    card = f"{found}?.textContent ?? ''"
    browser.until(lambda: "ranks 0, 1" in browser.run(card), "what runs on the node")
    browser.until(lambda: browser.count("#decisions [data-kind=start]"), "its start")

    os.kill(run.pids()[1], signal.SIGKILL)
    row = "#decisions [data-kind=lost]"
    browser.until(lambda: "worker died" in browser.text(row).replace("_", " "), "the worker that died")
    run.wait_for_event("incident.closed")

    try:
        browser.click("button[aria-label='Change the quotas of doomed-project']")
        browser.fill("#quota-limit", "1")
        browser.click("#confirm")
        browser.sees("#decisions [data-kind=shrink]", "project doomed-project may have 1 worker (its limit)")
        browser.sees("#projects [data-project=doomed-project]", "1 of 1")
    finally:
        client.delete_project("doomed-project")

    doomed.remove(NODE)
    browser.until(lambda: f"{NODE} dead" in browser.run(card), "the node is dead")
    client.cancel(run.id)
    run.finish(JobState.CANCELLED)
    browser.sees("#decisions [data-kind=leave]", "CANCELLED")
    assert browser.run("window.opened") == "once", "it was never loaded again"
    assert browser.complaints() == []
