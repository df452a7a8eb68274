"""The page of the account, the search over everything, and a line of a log that has an address."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service
from shoal_api.client import Client
from shoal_service.fleet_views import TableView
from shoal_service.reports import PendingLog
from shoal_service.store import job_lists
from shoal_service.views import JobPatch

HREFS = "[...document.querySelectorAll('.palette li[data-href]')].map((one) => one.dataset.href)"


@pytest.mark.first
def test_a_token_is_made_shown_once_used_and_revoked_and_the_session_ends(reader: Browser, written: Service) -> None:
    reader.open(f"{written.url}/account")
    reader.sees("#me", "admin")
    reader.fill("#token-name", "ada")
    reader.click("#make button")
    reader.sees("#secret", "shoal_")
    secret = reader.text("#secret")
    with Client(written.url, token=secret) as ada:
        assert ada.jobs() is not None
        reader.sees("#tokens", "ada")
        reader.driver.refresh()
        reader.sees("#tokens", "ada")
        assert reader.text("#secret") == "", "the service keeps only its SHA-256"
        reader.click('[aria-label="Revoke the token ada"]')
        reader.sees("#dialog-words", "Requests with it are refused from now on")
        reader.click("#confirm")
        reader.until(lambda: "ada" not in reader.text("#tokens"), "it is revoked")
    reader.tick("#ended")
    reader.sees("#tokens", "revoked")
    assert reader.complaints() == []
    reader.click("#log-out")
    reader.until(lambda: reader.run("location.pathname") == "/login", "the login page")
    reader.open(f"{written.url}/account")
    reader.until(lambda: reader.run("location.pathname") == "/login", "the session is over")


def test_the_search_finds_jobs_projects_sweeps_nodes_and_pages_without_a_mouse(
    reader: Browser, written: Service
) -> None:
    job = written.add_job(name="needle", project="haystack", labels={"sweep": "needles"})
    other = written.add_job(name="other", labels={"team": "speech"})
    with written.client as client:
        client.patch(other.id, JobPatch(annotations={"notes": "a jittery loss"}))
    written.store.writing(job_lists.put_view)("haystack", "nightly", TableView(where="loss < 2"), by="ada", now=AT)
    reader.open(f"{written.url}/sweeps")
    reader.until(lambda: reader.count("#site-search"), "the button")
    reader.press("/")
    reader.press("needle")
    reader.until(lambda: reader.run(HREFS) == [f"/jobs/{job.id}", "/sweeps?label=sweep%3Dneedles"], "job and sweep")
    for text, href in (("haystack", "/?project=haystack"), ("127.0", "/#nodes"), ("runb", "/runbook")):
        reader.press(Keys.CONTROL + "a")
        reader.press(text)
        reader.until(lambda href=href: href in reader.run(HREFS), text)
    kinds = "[...document.querySelectorAll('.palette li[data-kind]')].map((one) => one.dataset.kind)"
    texts = (("jittery", "notes"), ("team=spe", "label"), ("night", "view"), ("shoalnop", "topic"))
    for text, kind in texts:
        reader.press(Keys.CONTROL + "a")
        reader.press(text)
        reader.until(lambda kind=kind: kind in reader.run(kinds), kind)
    reader.press(Keys.CONTROL + "a")
    reader.press(job.id)
    reader.until(lambda: reader.run(HREFS) == [f"/jobs/{job.id}"], "by its id")
    reader.press(Keys.ENTER)
    reader.sees("#title", "needle")
    reader.press("?")
    reader.sees(".help", "this help")
    reader.press(Keys.ESCAPE)
    reader.until(lambda: reader.count("dialog[open]") == 0, "the help is closed")
    assert reader.complaints() == []


def test_a_line_of_the_log_has_an_address_also_if_it_is_older_than_what_the_page_has(
    reader: Browser, written: Service
) -> None:
    job = written.add_job()
    written.begin(job)
    lines = tuple(
        PendingLog(at=AT + n, rank=n % 2, worker_id="w", stream="stdout", text=f"line number {n}") for n in range(6000)
    )
    written.report(job, RUNNING, logs=lines)
    reader.open(f"{written.url}/jobs/{job.id}#tab=logs")
    reader.sees("#lines", "line number 5999")
    assert reader.count("#lines .line") < 500, "only lines near to those in view have elements"
    reader.open("about:blank")
    with written.client as client:
        old = next(line for line in client.logs(job.id) if line.text == "line number 20")
    reader.open(f"{written.url}/jobs/{job.id}#tab=logs&line={old.seq}")
    reader.sees("#lines .chosen", "line number 20")
    reader.fill("#log-search", "number 599")
    reader.until(lambda: reader.count("#lines .line") == 11, "older ones too")
    reader.driver.find_element("css selector", "#lines a").click()
    reader.until(lambda: "line=" in reader.run("location.hash"), "its address")
    assert "search=number+599" in reader.run("location.hash"), "the view has the filter too"
    assert reader.complaints() == []
