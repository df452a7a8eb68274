"""The page of a job without a mouse: Tab reaches the controls in their order, Enter and Escape do the rest, and the
focus stays where it was when what had it is drawn anew."""

from __future__ import annotations

from selenium.webdriver.common.keys import Keys

from kit.processes.chromium import Browser
from kit.processes.server import Server
from kit.worlds.tiny_jobs import Submit, holds
from shoal_api.client import Client
from shoal_workers.contract.job import JobState

_MOST_CONTROLS = 80
_FOCUSED = (
    "['data-checkpoint', 'data-action', 'id'].map((name) => document.activeElement.getAttribute(name)).find(Boolean)"
)


def test_tab_reaches_a_button_enter_opens_its_dialog_and_escape_closes_it(
    browser: Browser, shoal_server: Server, submit: Submit
) -> None:
    run = submit(workers=1, steps=2)
    run.finish()
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{run.id}")
    browser.until(lambda: browser.count('[data-checkpoint="verify-2"]') == 1, "the checkpoint of the last step")
    assert _tab_to(browser, "tab-overview").index("delete") > 0, "the buttons of the head come before the tabs"
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run(_FOCUSED) == "tab-curves" and browser.run("location.hash") == "#tab=curves"
    reached = _tab_to(browser, "log")
    assert reached.index("axis") < reached.index("smoothing") < reached.index("log")
    while browser.run(_FOCUSED) != "tab-curves":
        browser.press(Keys.SHIFT + Keys.TAB)
    browser.press(Keys.END)
    assert browser.run(_FOCUSED) == "tab-events"
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run(_FOCUSED) == "tab-overview", "after the last tab comes the first"
    browser.press(Keys.ARROW_LEFT + Keys.ARROW_LEFT + Keys.ARROW_LEFT)
    assert browser.run(_FOCUSED) == "tab-checkpoints"
    selected = "[...document.querySelectorAll('[role=tab][aria-selected=true]')].map((one) => one.id)"
    assert browser.run(selected) == ["tab-checkpoints"]
    _tab_to(browser, "verify-2")
    browser.press(Keys.ENTER)
    browser.sees("#dialog-title", "Verify the checkpoint of step 2")
    assert browser.run("document.getElementById('dialog').contains(document.activeElement)"), (
        "the focus is in the dialog"
    )
    browser.press(Keys.ESCAPE)
    browser.until(lambda: browser.count("#dialog[open]") == 0, "the dialog is closed")
    assert browser.run(_FOCUSED) == "verify-2", "the focus is where it was"
    while browser.run(_FOCUSED) != "pin-2":
        browser.press(Keys.SHIFT + Keys.TAB)
    browser.press(Keys.ENTER)
    browser.sees("#dialog-title", "Pin the checkpoint of step 2")
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.count("#dialog[open]") == 0, "the dialog is closed")
    browser.until(lambda: browser.run(_FOCUSED) == "unpin-2", "the focus is on what took the button's place")
    assert browser.complaints() == []


def _tab_to(browser: Browser, name: str) -> list[str]:
    """Return what Tab has reached on the way to a control."""
    reached: list[str] = []
    while name not in reached:
        assert len(reached) < _MOST_CONTROLS, reached
        browser.press(Keys.TAB)
        reached.append(browser.run(_FOCUSED))
        assert browser.run("document.activeElement.matches(':focus-visible')"), reached
    return reached


def test_a_job_is_scaled_and_paused_without_a_mouse_while_it_trains(
    browser: Browser, shoal_server: Server, submit: Submit, client: Client
) -> None:
    run = submit(workers=1, steps=2_000, strikes=holds(6, 12))
    run.wait_at("step-6-0")
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{run.id}")
    browser.until(lambda: browser.count('[data-action="pause"]') == 1, "the job runs")
    reached = []
    while "scale" not in reached:
        assert len(reached) < _MOST_CONTROLS, reached
        browser.press(Keys.TAB)
        reached.append(browser.run(_FOCUSED))
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.run(_FOCUSED) == "dialog-value", "the focus is on the number")
    browser.sees("#dialog-words", "That is the present number.")
    browser.press("4")  # what the field holds is selected
    browser.press(Keys.ESCAPE)
    browser.until(lambda: browser.count("#dialog[open]") == 0, "the dialog is closed")
    assert browser.run(_FOCUSED) == "scale" and client.job(run.id).spec.elasticity.max_workers == 1

    browser.press(Keys.TAB)
    assert browser.run(_FOCUSED) == "relayout"
    run.release("step-6-0")
    run.wait_at("step-12-0")
    browser.until(lambda: browser.run("shoalCurves.shown.series.step.at(-1)") == 11, "the page follows the job")
    assert browser.run(_FOCUSED) == "relayout", "reports of the job do not move the focus"
    while browser.run(_FOCUSED) != "pause":
        browser.press(Keys.TAB)
    browser.press(Keys.ENTER)
    browser.sees("#dialog-words", "No step is lost.")
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.run(_FOCUSED) == "resume", "the focus is on what took the button's place")
    run.release("step-12-0")
    run.wait_for(JobState.PAUSED)
    browser.sees("#title", "PAUSED")
    assert browser.run(_FOCUSED) == "resume"
    client.cancel(run.id)
    assert browser.complaints() == []
