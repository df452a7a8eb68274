"""A profile is taken from the page of a running job, and its parts and files appear there."""

from __future__ import annotations

from kit.processes.chromium import Browser
from kit.processes.server import Server
from kit.worlds.tiny_jobs import Submit, holds
from shoal_api.client import Client


def test_a_profile_that_is_asked_for_on_the_page_appears_with_its_files(
    browser: Browser, shoal_server: Server, submit: Submit, client: Client
) -> None:
    run = submit(workers=1, steps=60, step_s=0.2, strikes=holds(4))
    run.wait_at("step-4-0")
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{run.id}#tab=workers")
    browser.until(lambda: browser.count('[data-action="profile"]') == 1, "the job runs")
    browser.sees("#unprofiled", "No profile.")
    browser.click('[data-action="profile"]')
    browser.sees("#dialog-words", "no number changes")
    browser.click("#confirm")
    browser.sees("#profiles", "requested")
    run.release("step-4-0")
    browser.sees("#profiles", "done")
    browser.sees("#profiles", "compute")
    assert browser.count('#profiles a[href$=".json.gz"]') == 2
    client.cancel(run.id)
    assert browser.complaints() == []
