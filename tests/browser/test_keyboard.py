"""The page of a job without a mouse: Tab reaches the controls in their order, Enter and Escape do the rest."""

from __future__ import annotations

from selenium.webdriver.common.keys import Keys

from kit.processes.chromium import Browser
from kit.processes.server import Server
from kit.worlds.tiny_jobs import Submit

_MOST_CONTROLS = 80
_FOCUSED = "document.activeElement.getAttribute('data-checkpoint') || document.activeElement.id"


def test_tab_reaches_a_button_enter_opens_its_dialog_and_escape_closes_it(
    browser: Browser, shoal_server: Server, submit: Submit
) -> None:
    run = submit(workers=1, steps=2)
    run.finish()
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{run.id}")
    browser.until(lambda: browser.count('[data-checkpoint="verify-2"]') == 1, "the checkpoint of the last step")
    reached = []
    while "verify-2" not in reached:
        assert len(reached) < _MOST_CONTROLS, reached
        browser.press(Keys.TAB)
        reached.append(browser.run(_FOCUSED))
        assert browser.run("document.activeElement.matches(':focus-visible')"), reached
    assert reached.index("axis") < reached.index("smoothing") < reached.index("log") < reached.index("verify-2")
    browser.press(Keys.ENTER)
    browser.sees("#dialog-title", "Verify the checkpoint of step 2")
    assert browser.run("document.getElementById('dialog').contains(document.activeElement)"), (
        "the focus is in the dialog"
    )
    browser.press(Keys.ESCAPE)
    browser.until(lambda: browser.count("#dialog[open]") == 0, "the dialog is closed")
    assert browser.run(_FOCUSED) == "verify-2", "the focus is where it was"
    assert browser.complaints() == []
