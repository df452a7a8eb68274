"""Pins on the page of a job: a real attempt keeps the pinned checkpoint, and deletes those around it."""

from __future__ import annotations

from kit.processes.chromium import Browser
from kit.processes.server import Server
from kit.worlds.tiny_jobs import Submit, holds
from shoal_api.client import Client
from shoal_service.views import JobPatch


def test_a_checkpoint_that_is_pinned_on_the_page_survives_retention(
    browser: Browser, shoal_server: Server, submit: Submit, client: Client
) -> None:
    run = submit(workers=1, steps=24, strikes=holds(10), checkpoint={"every_steps": 4, "keep": 1})
    run.wait_at("step-10-0")
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{run.id}#tab=checkpoints")
    browser.until(lambda: browser.count('[data-checkpoint="pin-8"]') == 1, "the checkpoint of step 8")
    browser.click('[data-checkpoint="export-8"]')
    command = f"shoal export {run.id} OUT --step 8"
    browser.until(lambda: browser.run("document.getElementById('export-command')?.value") == command, command)
    browser.click("#dismiss")
    browser.click('[data-checkpoint="delete-8"]')
    browser.sees("#dialog-words", "It is the newest one of a job that has not ended, so the service refuses this")
    browser.click("#dismiss")
    browser.click('[data-checkpoint="pin-8"]')
    browser.sees("#dialog-words", "keeps its newest 1 checkpoint and deletes older ones")
    browser.click("#confirm")
    browser.sees("#checkpoints", "committed, pinned")

    client.patch(run.id, JobPatch(priority=1))  # the attempt has observed the pin once it has observed this
    browser.until(lambda: client.job(run.id).status.observed_generation == 2, "the directive has arrived")
    run.release("step-10-0")
    run.finish()

    def kept() -> list[tuple[int, bool]]:
        return [(one.step, one.pinned) for one in client.checkpoints(run.id) if one.state == "committed"]

    browser.until(lambda: kept() == [(8, True), (24, False)], "the others are deleted")

    browser.sees("#live", "ended")
    browser.click('[data-checkpoint="unpin-8"]')
    browser.sees("#dialog-words", "The job has ended, so nothing deletes it")
    browser.click("#confirm")
    browser.until(lambda: browser.count('[data-checkpoint="pin-8"]') == 1, "it is no longer pinned")

    browser.click('[data-checkpoint="verify-24"]')
    browser.sees("#dialog-words", "compares lengths and checksums")
    browser.click("#confirm")
    browser.until(lambda: browser.count("#dialog[open]") == 0, "every byte is as it was written")
    browser.click('[data-checkpoint="delete-8"]')
    browser.sees("#dialog-words", "cannot be undone. 1 other checkpoint of the job is kept.")
    browser.click("#confirm")
    browser.until(lambda: browser.count('[data-checkpoint="delete-8"]') == 0, "it is deleted")
    assert [one.step for one in client.checkpoints(run.id) if one.state == "committed"] == [24]
    assert browser.complaints() == []
