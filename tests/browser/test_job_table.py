"""The table of jobs: conditions and their mistakes, columns, orders, chosen jobs and their changes, saved views."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from selenium.webdriver.common.keys import Keys

from kit.processes.chromium import Browser
from kit.worlds.written_service import Service
from shoal_service.views import JobPatch, JobView
from shoal_workers.contract.job import EndReason

NAMES = "[...document.querySelectorAll('#jobs tr td.title a')].map((one) => one.textContent)"
HEADS = "[...document.querySelectorAll('#heads th')].map((one) => one.textContent)"


@pytest.fixture
def jobs(written: Service) -> list[JobView]:
    """A slow one and a fast one that train, and a fast one that has ended."""
    slow = written.add_job(name="slow", optimizer={"lr": 1e-4}, labels={"team": "speech"})
    fast = written.add_job(name="fast", optimizer={"lr": 1e-2}, labels={"team": "speech"})
    over = written.add_job(name="over", optimizer={"lr": 1e-2})
    for job in (slow, fast, over):
        written.train(job)
    written.finish(over, EndReason.FINISHED)
    return [slow, fast, over]


def shows(reader: Browser, *names: str) -> None:
    reader.until(lambda: reader.run(NAMES) == list(names), f"the jobs {names}")


@pytest.mark.first
def test_jobs_are_found_by_a_condition_and_a_mistake_is_shown_at_its_place(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    reader.open(f"{written.url}/")
    shows(reader, "over", "fast", "slow")
    reader.fill("#where", 'lr > 1e-3 and state == "RUNNING" and label.team == "speech"')
    shows(reader, "fast")
    assert reader.complaints() == []
    reader.fill("#where", "los < 3")
    reader.sees("#where-error", "there is no 'los'; near it are loss")
    assert reader.run("document.querySelector('#where-error').textContent.split('\\n').slice(1)") == [
        "  los < 3",
        "  ^^^",
    ]
    assert reader.run("document.querySelector('#where').getAttribute('aria-invalid')") == "true"
    assert reader.run(NAMES) == ["fast"], "the table stays as it is"
    assert all("422" in one for one in reader.complaints())
    reader.fill("#where", "lr < 1e-3")
    shows(reader, "slow")
    assert reader.count("#where-error:not([hidden])") == 0
    reader.driver.refresh()
    shows(reader, "slow")
    assert reader.run("document.querySelector('#where').value") == "lr < 1e-3", "the address holds the condition"
    assert reader.complaints() == []


def test_columns_are_chosen_ordered_saved_as_a_view_and_exported(
    reader: Browser, written: Service, jobs: list[JobView], tmp_path: Path
) -> None:
    reader.open(f"{written.url}/")
    shows(reader, "over", "fast", "slow")
    reader.click("#choose-columns")
    reader.fill("#column-search", "optimizer.lr")
    reader.click('[data-column="optimizer.lr"]')
    reader.fill("#column-search", "label.team")
    reader.click('[data-column="label.team"]')
    reader.until(lambda: reader.run(HEADS) == ["", "Job", "State", "optimizer.lr", "label.team"], "the chosen columns")
    reader.click("#heads th:nth-child(4) button")
    shows(reader, "slow", "over", "fast")
    reader.click("#heads th:nth-child(4) button")
    shows(reader, "over", "fast", "slow")
    assert reader.run("document.querySelector('#heads th:nth-child(4)').getAttribute('aria-sort')") == "descending"
    assert reader.text("#jobs tr:last-child td.value") == "0.0001 speech"

    reader.click("#more summary")
    reader.click("#save-view")
    reader.fill("#dialog-value", "rates")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#dialog[open]") == 0, "the view is saved")
    with written.client as client:
        [saved] = client.views()
    assert (saved.project, saved.name, saved.view.columns, saved.view.sort) == (
        *("default", "rates"),
        *("optimizer.lr,label.team", "-optimizer.lr"),
    )
    reader.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    reader.click("#export-csv")
    assert table_of(reader, tmp_path / "jobs.csv") == [
        ("over", "0.01", ""),
        ("fast", "0.01", "speech"),
        ("slow", "0.0001", "speech"),
    ]
    assert "over" in reader.run(NAMES), "the page stays"

    reader.open(f"{written.url}/")
    shows(reader, "over", "fast", "slow")
    assert "Tokens/s" in reader.run(HEADS)
    reader.until(lambda: reader.count("#views option") == 2, "the saved view")
    reader.click("#views option[value='default/rates']")
    reader.until(lambda: "optimizer.lr" in " ".join(reader.run(HEADS)), "the columns of the view")
    reader.click("#more summary")
    reader.click("#drop-view")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#views option") == 1, "no view is left")
    with written.client as client:
        assert client.views() == ()
    assert reader.complaints() == []


def test_a_window_of_1000_px_shows_twenty_jobs_whose_box_in_the_head_selects_the_page(
    reader: Browser, written: Service
) -> None:
    for number in range(30):
        written.add_job(name=f"job-{number}", labels={"team": "speech", "a-long-label": "with a long value"})
    reader.look(width=1400, height=1000)
    reader.open(f"{written.url}/")
    reader.until(lambda: reader.count("#jobs tr") == 25, "a page of jobs")
    seen = (
        "[...document.querySelectorAll('#jobs tr')].filter((one) => one.getBoundingClientRect().bottom <= 1000).length"
    )
    assert reader.run(seen) >= 20
    box = "['checked', 'indeterminate'].map((name) => document.getElementById('choose-page')[name])"
    reader.click("#choose-page")
    reader.sees("#num-chosen", "25 jobs selected")
    assert reader.count("#jobs input:checked") == 25 and reader.run(box) == [True, False]
    assert reader.run("document.getElementById('chosen-bar').getBoundingClientRect().bottom <= 1000"), "it is in view"
    reader.click("#jobs tr input")
    reader.sees("#num-chosen", "24 jobs selected")
    assert reader.run(box) == [False, True]
    reader.click("#choose-all")
    reader.sees("#num-chosen", "30 jobs selected")
    reader.click("#after")
    reader.until(lambda: reader.count("#jobs tr") == 5, "the other page")
    reader.until(lambda: reader.run(box) == [True, False], "it is chosen too")
    reader.click("#choose-page")
    reader.sees("#num-chosen", "25 jobs selected")
    assert reader.complaints() == []


def table_of(reader: Browser, file: Path) -> list[tuple[Any, ...]]:
    """Reads and removes a file of the table when it has arrived: name, rate and team of each job."""
    reader.until(file.exists, f"the file {file.name}")
    if file.suffix == ".csv":
        with file.open(newline="") as text:
            rows: list[dict[str, Any]] = list(csv.DictReader(text))
    else:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    file.unlink()
    return [(row["name"], row["optimizer.lr"], row["label.team"]) for row in rows]


@pytest.mark.first
def test_chosen_jobs_are_labelled_archived_and_deleted_and_refusals_are_shown(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    slow, fast, over = jobs
    reader.open(f"{written.url}/?where=lr+%3E+1e-3")
    shows(reader, "over", "fast")
    assert reader.run("document.querySelector('#chosen-bar').hidden")
    reader.click("#choose-page")
    reader.sees("#num-chosen", "2 jobs selected")
    reader.click("[data-deed=label]")
    reader.fill("#dialog-value", "kind=fast draft=")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#dialog[open]") == 0, "the labels are set")
    assert written.store.get_job(over.id).spec.labels == {"kind": "fast", "draft": ""}
    assert written.store.get_job(fast.id).spec.labels == {"kind": "fast", "draft": "", "team": "speech"}

    reader.fill("#where", "label.draft")
    shows(reader, "over", "fast")
    reader.click("#choose-page")
    reader.click("[data-deed=archive]")
    reader.click("#confirm")
    reader.sees("#dialog-error", "it cannot be archived before it has ended")
    reader.click("#dismiss")
    reader.sees("#num-chosen", "1 job selected")
    assert written.store.get_job(over.id).archived_at is not None
    shows(reader, "fast")
    reader.click("#more summary")
    reader.click("#archived")
    reader.sees("#more summary", "More (1)")
    shows(reader, "over", "fast")
    reader.click("#choose-none")
    reader.tick(f"tr[data-id={over.id}] input")
    reader.click("[data-deed=delete]")
    reader.sees("#dialog-words", "This cannot be undone")
    reader.click("#confirm")
    shows(reader, "fast")
    with written.client as client:
        assert [one.id for one in client.jobs(archived=True)] == [fast.id, slow.id]
    assert all("409" in one for one in reader.complaints())


def test_labels_and_notes_of_a_job_are_edited_in_place_after_its_end(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    over = jobs[2]
    reader.open(f"{written.url}/jobs/{over.id}")
    reader.sees("#edit-notes", "Edit notes")
    assert reader.text("#undescribed") == "No notes yet."
    reader.press("l")
    for label in ("team=speech", "draft"):
        reader.press(label + Keys.ENTER)
        reader.until(lambda label=label: label in reader.text("#labels") and not reader.run("label.value"), label)
    assert written.store.get_job(over.id).spec.labels == {"team": "speech", "draft": ""}
    reader.press("not a name=1" + Keys.ENTER)
    reader.sees("#label-error", "labels")
    reader.press(Keys.ESCAPE)
    reader.until(lambda: reader.text("#label-error") == "", "the mistake is gone")
    assert all("422" in one for one in reader.complaints())
    reader.click('[aria-label="Remove the label team=speech"]')
    reader.until(lambda: "team" not in reader.text("#labels"), "one label is left")
    assert written.store.get_job(over.id).spec.labels == {"draft": ""}

    notes = (
        "# Why\n- a **bold** guess\n- `lr` [too](/docs) [large](javascript:alert(1))\n\n"
        "<img src=x onerror=alert(1)> *or* not\n"
    )
    reader.click("#edit-notes")
    assert reader.run("document.activeElement.id") == "notes-text"
    reader.press(notes)
    reader.until(lambda: reader.count("#notes-preview li") == 2, "the preview")
    reader.press(Keys.CONTROL + Keys.ENTER)
    reader.until(
        lambda: reader.count("#notes li") == 2 and not reader.count("#notes-editor:not([hidden])"), "the notes"
    )
    assert [reader.text(f"#notes {name}") for name in ("h3", "strong", "li code", "em")] == ["Why", "bold", "lr", "or"]
    assert reader.count("#notes img") == 0 and "<img" in reader.text("#notes"), "HTML stays text"
    links = reader.run("[...document.querySelectorAll('#notes a')].map((one) => one.getAttribute('href'))")
    assert links == ["/docs"], "an address that runs a script is no link"
    assert written.store.get_job(over.id).spec.annotations == {"notes": notes}

    reader.click("#notes strong")
    reader.press("lost")
    reader.press(Keys.ESCAPE)
    reader.sees("#dialog-words", "is lost")
    reader.click("#confirm")
    reader.until(lambda: not reader.count("#notes-editor:not([hidden])"), "the editor is closed")
    assert written.store.get_job(over.id).spec.annotations == {"notes": notes}
    reader.click("#archive")
    reader.click("#confirm")
    reader.sees("#archived-at", "Archived")
    assert written.store.get_job(over.id).archived_at is not None
    reader.click("#archive")
    reader.click("#confirm")
    reader.until(lambda: reader.text("#archive") == "Archive", "the job is in the lists again")
    assert reader.complaints() == []


def test_two_people_who_write_notes_at_once_see_both_texts_and_lose_none(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    over = jobs[2]
    reader.open(f"{written.url}/jobs/{over.id}")
    reader.sees("#edit-notes", "Edit notes")
    reader.press("n")
    reader.press("mine")
    with written.client as client:
        client.patch(over.id, JobPatch(labels={"seen": "no"}))
        client.patch(over.id, JobPatch(annotations={"notes": "theirs"}))
    reader.press(Keys.CONTROL + Keys.ENTER)
    reader.sees("#notes-theirs", "theirs")
    assert reader.run("document.getElementById('notes-text').value") == "mine", "what was written stays"
    assert written.store.get_job(over.id).spec.annotations == {"notes": "theirs"}
    reader.click("#notes-both")
    reader.press(Keys.CONTROL + Keys.ENTER)
    reader.until(lambda: reader.text("#notes").split() == ["mine", "theirs"], "both")
    assert written.store.get_job(over.id).spec.annotations == {"notes": "mine\n\ntheirs"}

    reader.press("n")
    reader.press(" again")
    with written.client as client:
        client.patch(over.id, JobPatch(labels={"other": "yes"}))
    reader.press(Keys.CONTROL + Keys.ENTER)
    reader.until(lambda: not reader.count("#notes-editor:not([hidden])"), "a label is no conflict")
    assert written.store.get_job(over.id).spec.annotations == {"notes": "mine\n\ntheirs again"}
    assert [one for one in reader.complaints() if "412" not in one] == []
