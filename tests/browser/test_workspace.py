"""The workspace: jobs are shown, hidden, grouped and coloured; panels share their zoom and are arranged; another user
opens a view; points arrive without a reload."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from kit.processes.chromium import Browser
from kit.worlds.written_service import RUNNING, Service, point
from shoal_service.access_views import TokenRequest
from shoal_service.core.access import Role
from shoal_service.views import JobView

PANELS = "[...document.querySelectorAll('.panel')].map((one) => one.dataset.y)"
LABEL = "document.querySelector('.panel canvas').getAttribute('aria-label')"
PICTURE = "document.querySelector('.panel canvas').toDataURL()"
HIDE = "[data-key='{}'] input[type=checkbox]"
EXTENTS = {"time": "1 s to 40 s", "tokens": "100 to 4000", "samples": "32 to 1280"}
"""Ends of the axis for the jobs below: a step a second, 4,000 tokens in 40 steps, and 32 samples each."""


@pytest.fixture
def jobs(written: Service) -> list[JobView]:
    """Two of one team with different rates, and one of another team."""
    made = [
        written.add_job(name=name, labels={"team": team}, optimizer={"lr": lr})
        for name, team, lr in (("slow", "speech", 1e-4), ("fast", "speech", 1e-2), ("other", "vision", 1e-3))
    ]
    for number, job in enumerate(made):
        written.train(job)
        series = tuple(point(step, 5.0 + number - step / 20) for step in range(11, 41))
        own = tuple(one.model_copy(update={"metrics": {"accuracy": one.step / 40}}) for one in series)
        written.report(job, RUNNING.model_copy(update={"step": 40, "tokens": 4000}), series=own)
    return made


def drawn(reader: Browser, num: int, panel: int = 0) -> None:
    """Waits until that many curves, points or bars are in a panel."""
    canvas = f"document.querySelectorAll('.panel canvas[role=img]')[{panel}]?.dataset.num"
    reader.until(lambda: reader.run(canvas) == str(num), f"{num} in panel {panel}")


def test_jobs_are_hidden_shown_alone_coloured_and_grouped(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    reader.open(f"{written.url}/workspace")
    drawn(reader, 3)
    assert reader.text("#runs a").split() == ["other", "fast", "slow"]
    before = reader.run(PICTURE)
    reader.click(HIDE.format(jobs[0].id))
    drawn(reader, 2)
    reader.sees("#num-runs", "2 of 3 jobs shown")
    assert reader.run(PICTURE) != before
    reader.click(f"[data-key='{jobs[1].id}'] button")
    drawn(reader, 1)
    reader.click("#show-all")
    drawn(reader, 3)
    before = reader.run(PICTURE)
    dot = f"document.querySelector(\"[data-key='{jobs[0].id}'] input[type=color]\")"
    reader.run(f"(({dot}).value = '#ff0000', ({dot}).dispatchEvent(new Event('input', {{ bubbles: true }})))")
    reader.until(lambda: reader.run(PICTURE) != before, "the new colour")

    reader.fill("#group", "optimizer.lr")
    reader.press(Keys.TAB)
    reader.sees("#num-runs", "3 of 3 groups shown")
    keys = reader.run("[...document.querySelectorAll('#runs [data-key]')].map((row) => row.dataset.key)")
    assert keys == ["0.0001", "0.001", "0.01"]
    reader.fill("#group", "label.team")
    reader.press(Keys.TAB)
    drawn(reader, 2)
    reader.sees("#runs", "label.team: speech (2)")
    before = reader.run(PICTURE)
    reader.click(HIDE.format("vision"))
    drawn(reader, 1)
    reader.until(lambda: reader.run(PICTURE) != before, "one group")
    reader.fill("#where", 'label.team == "vision"')
    reader.sees("#num-runs", "0 of 1 groups shown")
    reader.fill("#where", "los < 2")
    reader.sees("#where-error", "there is no 'los'")
    assert all("422" in one for one in reader.complaints())


def test_a_zoom_is_that_of_all_panels_with_the_pointer_and_the_keyboard(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    pictures = "[...document.querySelectorAll('.panel canvas[role=img]')].slice(0, 2).map((one) => one.toDataURL())"
    reader.look(width=1400)
    reader.open(f"{written.url}/workspace")
    drawn(reader, 3)
    drawn(reader, 3, panel=2)
    canvas = reader.driver.find_element(By.CSS_SELECTOR, ".panel[data-y=tokens_per_s] canvas")
    whole = reader.run(pictures)
    ActionChains(reader.driver).move_to_element_with_offset(canvas, -60, 0).click_and_hold().move_by_offset(
        80, 0
    ).release().perform()
    reader.until(lambda: reader.run("!document.querySelector('#unzoom').disabled"), "the zoom")
    reader.until(lambda: reader.run(pictures)[0] != whole[0], "the first panel is zoomed, too")
    reader.click("#unzoom")
    reader.run("document.querySelector('.panel canvas').focus()")
    reader.press("+")
    reader.until(lambda: reader.run("!document.querySelector('#unzoom').disabled"), "the zoom by keyboard")
    zoomed = reader.run(pictures)
    reader.press(Keys.ARROW_RIGHT)
    reader.until(lambda: reader.run(pictures) != zoomed, "the next part")
    reader.press("0")
    reader.until(lambda: reader.run("document.querySelector('#unzoom').disabled"), "the whole axis")
    for axis, extent in EXTENTS.items():
        reader.click(f"#axis option[value={axis}]")
        words = f"loss over {axis}: 3 curves, from {extent}"
        reader.until(lambda: reader.run(LABEL) == words, words)  # noqa: B023
    reader.click("#log-x")
    reader.until(lambda: reader.run(LABEL) == words, "a logarithmic axis spans the same")
    ActionChains(reader.driver).move_to_element(canvas).perform()
    reader.sees(".words", "other")
    position = "[...document.querySelectorAll('.words')].find((one) => !one.hidden).firstChild.textContent"
    name, samples = reader.run(position).split(" ")
    assert name == "samples" and int(samples.replace(",", "")) % 32 == 0, "that of a step which exists"
    assert reader.complaints() == []


def test_panels_are_added_arranged_and_opened_by_another_user(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    reader.look(width=1400, height=2600)  # only panels in view are drawn
    reader.open(f"{written.url}/workspace")
    drawn(reader, 3)
    reader.fill("#y", "metric.accuracy")
    reader.press(Keys.ENTER)
    drawn(reader, 3, panel=6)
    reader.click("#kind option[value=scatter]")
    reader.fill("#y", "step")
    reader.fill("#x", "optimizer.lr")
    reader.press(Keys.ENTER)
    drawn(reader, 3, panel=7)
    reader.click("#kind option[value=bars]")
    reader.fill("#y", "step")
    reader.press(Keys.ENTER)
    drawn(reader, 3, panel=8)
    reader.run("document.querySelector('.panel[data-y=val_loss] [aria-label^=Remove]').focus()")
    reader.press(Keys.ENTER)
    reader.run("document.querySelector('.panel [aria-label^=\"Move after\"]').focus()")
    reader.press(Keys.ENTER)
    reader.until(lambda: reader.run(PANELS)[:2] == ["tokens_per_s", "loss"], "the order by keyboard")
    handle, target = (
        reader.driver.find_element(By.CSS_SELECTOR, f".panel[data-y={name}] h3") for name in ("loss", "tokens_per_s")
    )
    ActionChains(reader.driver).click_and_hold(handle).move_to_element(target).release().perform()
    reader.until(lambda: reader.run(PANELS)[:2] == ["loss", "tokens_per_s"], "the order by pointer")
    reader.click(".panel [aria-label^='Change width']")
    reader.fill("#group", "label.team")
    reader.press(Keys.TAB)
    drawn(reader, 2)
    plain = reader.run(PICTURE)
    reader.click("#band option[value=std]")
    reader.until(lambda: reader.run(PICTURE) != plain, "another band")
    reader.click("#axis option[value=tokens]")
    reader.click("#log-x")
    reader.click(".panel [aria-label^='Log axis']")
    reader.click(".panel [aria-label^='Hide outliers']")
    reader.fill("#limit", "50")
    reader.press(Keys.TAB)
    reader.click("#project option[value=default]")
    reader.click(HIDE.format("vision"))
    drawn(reader, 1)
    dot = 'document.querySelector("[data-key=speech] input[type=color]")'
    reader.run(f"(({dot}).value = '#ff0000', ({dot}).dispatchEvent(new Event('input', {{ bubbles: true }})))")
    reader.run("document.querySelector('.panel canvas').focus()")
    reader.press("+")
    reader.until(lambda: reader.run("!document.querySelector('#unzoom').disabled"), "the zoom")
    kept = reader.run(LABEL)
    reader.click("#save-view")
    reader.fill("#dialog-value", "teams")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#dialog[open]") == 0, "the view is saved")
    address = reader.run("location.href")
    assert address.endswith("/workspace?view=default%2Fteams")

    with written.client as client:
        token = client.create_token(TokenRequest(name="eve", role=Role.VIEWER)).token
    reader.driver.delete_all_cookies()
    reader.open(address)
    reader.until(lambda: reader.run("location.pathname") == "/login", "the login page")
    reader.fill("input[type=password]", token)
    reader.press(Keys.ENTER)
    reader.until(lambda: reader.run("location.pathname") == "/workspace", "the login leads back to the view")
    reader.sees("#title", "teams")
    drawn(reader, 1)
    reader.until(lambda: reader.run(LABEL) == kept, f"axis, logarithm and zoom: {kept}")
    controls = "['group', 'band', 'axis', 'limit', 'project'].map((id) => document.getElementById(id).value)"
    assert reader.run(controls) == ["label.team", "std", "tokens", "50", "default"]
    assert reader.run("document.querySelector('#log-x').checked")
    pressed = "[...document.querySelector('.panel').querySelectorAll('[aria-pressed=true]')].map((one) => one.title)"
    assert reader.run(pressed) == ["Log axis", "Hide outliers"]
    assert reader.run(f"({dot}).value") == "#ff0000"
    assert not reader.driver.find_element(By.CSS_SELECTOR, HIDE.format("vision")).is_selected()
    assert reader.run(PANELS) == [
        "loss",
        "tokens_per_s",
        "grad_norm",
        "lr",
        "world_size",
        "metric.accuracy",
        *("step",) * 2,
    ]
    assert reader.run("document.querySelector('.panel').style.gridColumn") == "span 2"
    assert all("401" in one for one in reader.complaints())
