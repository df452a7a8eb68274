"""The page of a job in states that a real run passes quickly or ends in, and the page that compares none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest
from selenium.webdriver.common.keys import Keys

from kit.processes.chromium import Browser
from kit.worlds.kept_files import keep_files
from kit.worlds.written_service import AT, CHECKPOINT, RUNNING, Service, point
from shoal_service.control.spec_io import SpecFormat, parse_text
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingLog
from shoal_service.store import job_deletion
from shoal_service.views import JobView
from shoal_workers.contract.job import EndReason, JobState, UserFailure

ACTIONS = "[...document.querySelectorAll('#actions button')].map((one) => one.dataset.action)"
_HIDDEN = (
    "(Object.defineProperty(document, 'hidden', {{ get: () => {}, configurable: true }}), "
    "document.dispatchEvent(new Event('visibilitychange')), 1)"
)
"""A user looks at another tab, or comes back."""
COMMAND = "document.querySelector('#export-command').value"
_FILES = "[...document.querySelectorAll('#files a')].map((one) => one.getAttribute('href'))"


def test_a_job_that_has_ended_is_run_again_extended_tried_again_and_deleted_at_its_head(
    reader: Browser, written: Service
) -> None:
    failed = _failed(written)
    _open(reader, written, failed)
    assert reader.run(ACTIONS) == ["retry", "extend", "continue", "again", "export", "rename", "delete"]
    _do(reader, "again", "A new job with the same spec")
    reader.until(lambda: failed.id not in reader.run("location.pathname"), "the page of the new job")
    reader.sees("#title", "QUEUED")
    again = written.store.get_job(reader.run("location.pathname").rpartition("/")[2])
    assert again.spec == failed.spec and again.id != failed.id

    _open(reader, written, failed)
    _do(reader, "retry", "goes on from its checkpoint of step 10")
    reader.sees("#title", "QUEUED")
    done = _done(written)
    _open(reader, written, done)
    assert reader.run(ACTIONS) == ["extend", "continue", "again", "export", "rename", "delete"]
    reader.click('[data-action="extend"]')
    reader.fill("#dialog-value", "50")
    reader.sees("#dialog-words", "More than the 100 steps that are done.")
    reader.click("#dismiss")
    _do(reader, "extend", "from its checkpoint of step 10 to step 200")
    reader.until(lambda: written.store.get_job(done.id).spec.stop.steps == 200, "the new end")
    reader.sees("#title", "QUEUED")  # the page was loaded again; before, it would take the place of the next one

    gone = _failed(written)
    _open(reader, written, gone)
    _do(reader, "delete", "This cannot be undone")
    reader.until(lambda: reader.run("location.pathname") == "/", "the page of all jobs")
    assert [
        one.job_id for one in written.store.reading(job_deletion.read_newest)(project=None, limit=10, visible=None)
    ] == [gone.id]
    assert reader.complaints() == []


def test_the_files_of_a_job_are_listed_and_names_are_text(reader: Browser, written: Service, tmp_path: Path) -> None:
    job, name = _done(written), "runs/<img src=x onerror=alert(1)>/a b%41?.txt"
    root = tmp_path / "checkpoints" / job.id
    keep_files(root, 0, {name: b"content", "last.pt": b"0" * 2048}, num_left_out=1)
    _open(reader, written, job, "files")
    reader.until(lambda: reader.count("#files tr") == 2, "the files")
    assert reader.text("#files a") == f"last.pt {name}"
    reader.sees("#files-said", "2 files, 2.01 KiB; 1 file with 0 B not kept (outputs.max_gib)")
    [path] = [one for one in reader.run(_FILES) if "runs" in one]
    assert unquote(path) == f"/v1/jobs/{job.id}/files/{name}"
    reader.fill("#files-match", "*.bin")
    reader.sees("#no-files", "No such file.")
    assert reader.complaints() == []


@pytest.mark.first
def test_a_job_that_has_ended_is_continued_in_a_new_job_after_a_look_at_what_changes(
    reader: Browser, written: Service
) -> None:
    done = _done(written)
    _open(reader, written, done)
    reader.click('[data-action="continue"]')
    reader.sees("#dialog-words", "A new job is submitted with 2 changes.")
    reader.sees("#dialog-words", f"It starts from the checkpoint of {done.id} after step 10. This job is not changed.")
    reader.sees("#dialog-words", f'continue_from.job: \u2013 \u2192 "{done.id}"')
    reader.sees("#dialog-words", "continue_from.step: \u2013 \u2192 10")
    _replace(reader, "global_size: 32", "global_size: 0")
    reader.sees("#dialog-words", "batch.global_size: ")
    reader.click("#confirm")
    reader.sees("#dialog-error", "batch.global_size: ")
    with written.client as client:
        assert len(list(client.jobs())) == 1, "nothing was submitted"
    _replace(reader, "global_size: 0", "global_size: 32")
    _replace(reader, "steps: 100", "steps: 300")
    reader.sees("#dialog-words", "A new job is submitted with 3 changes.")
    reader.sees("#dialog-words", "stop.steps: 100 \u2192 300")
    reader.click("#confirm")
    reader.until(lambda: done.id not in reader.run("location.pathname"), "the page of the new job")
    reader.sees("#title", "QUEUED")
    new = written.store.get_job(reader.run("location.pathname").rpartition("/")[2])
    assert new.spec.continue_from is not None and new.spec.stop.steps == 300
    assert (new.spec.continue_from.job, new.spec.continue_from.step) == (done.id, 10)
    assert written.store.get_job(done.id).status.state is JobState.SUCCEEDED

    reader.sees("#facts", f"{done.id} after step 10")
    reader.click(f"#facts a[href*='{done.id}']")
    reader.until(lambda: reader.count("#checkpoints tr.chosen[data-step='10']"), "the checkpoint of the parent")
    assert [one for one in reader.complaints() if "422" not in one] == []


def test_a_job_that_has_ended_is_exported_by_a_command_that_is_copied(reader: Browser, written: Service) -> None:
    done = written.add_job(name="done")
    written.train(done)
    later = CHECKPOINT.model_copy(update={"step": 20, "url": "/tmp/x/step-20"})
    written.report(done, RUNNING, checkpoints=(later,))
    written.finish(done)
    _open(reader, written, done)
    with _clipboard(reader, written, "granted"):
        reader.click('[data-action="export"]')
        reader.until(lambda: reader.run(COMMAND) == f"shoal export {done.id} OUT --step 20", "the newest checkpoint")
        reader.sees("#dialog-words", "as safetensors and config.json")
        reader.run("(document.querySelector('#dialog-value').focus(), 1)")
        reader.press(Keys.ARROW_DOWN)
        command = f"shoal export {done.id} OUT --step 10"
        reader.until(lambda: reader.run(COMMAND) == command, "the one that was chosen")
        reader.click("#confirm")
        reader.sees("#dialog-words", f"Copied: {command}")
        script = "navigator.clipboard.readText().then(arguments[0], (error) => arguments[0](String(error)))"
        assert reader.driver.execute_async_script(script) == command
    with _clipboard(reader, written, "denied"):
        reader.click("#confirm")
        reader.sees("#dialog-error", "The command is selected: copy it with Ctrl+C or Cmd+C.")
        assert reader.run("document.activeElement.id") == "export-command"
        assert reader.run("document.getSelection().toString()") == command
    reader.click("#dismiss")
    assert reader.complaints() == []


@pytest.mark.first
def test_the_head_of_a_failed_job_begins_with_its_error_and_the_way_out(reader: Browser, written: Service) -> None:
    _open(reader, written, _failed(written))
    reader.sees("#message", "no space")
    reader.sees("#way-out", "Make checkpoint.url readable and writable again, then Retry.")
    order = "[...document.querySelectorAll('.head [id]')].map((one) => one.id)"
    shown: list[str] = reader.run(order)
    assert shown.index("message") < shown.index("way-out") < shown.index("vital") < shown.index("actions")
    assert reader.run("document.querySelector('#message').className") == "bad"


def test_a_failed_job_says_its_error_once_with_the_last_lines_of_the_rank(reader: Browser, written: Service) -> None:
    job = written.add_job(name="square", retry={"max_failures": 0})
    written.train(job)
    failure = UserFailure(
        type="KeyError",
        message="'square'",
        traceback="File shapes.py, line 66",
        phase="forward",
        ranks=(1,),
        step=12,
        line="shapes.py:66 in loss()",
    )
    message = "KeyError: 'square' (shapes.py:66 in loss())"
    written.report(job, RUNNING, end=AttemptEnd(reason=EndReason.USER_ERROR, message=message, step=12, failure=failure))
    _open(reader, written, job)
    reader.sees("#message", f"Your code raised {message}, on rank 1. Not retried: retry.max_failures 0 is used up.")
    reader.sees("#last-lines", "Rank 1, step 12\nhello from rank 1")
    assert "rank 0" not in reader.text("#last-lines") and reader.text(".head").count("KeyError") == 1
    assert not reader.run("document.querySelector('#traceback').open")
    reader.click("#traceback summary")
    reader.sees("#traceback", "Traceback: Rank 1, step 12\nFile shapes.py, line 66")
    assert reader.complaints() == []


def test_a_curve_marks_its_spike_and_where_it_is_not_finite(reader: Browser, written: Service) -> None:
    job = written.add_job(name="diverges")
    written.begin(job)
    losses = [4.0] * 10 + [40.0] + [4.0] * 9 + [math.nan] * 5
    written.report(job, RUNNING, series=tuple(point(step, loss) for step, loss in enumerate(losses, start=1)))
    _open(reader, written, job)
    reader.until(lambda: reader.count("#loss-chart .scatterlayer .trace"), "the curve of the loss")
    marked = "document.getElementById('loss-chart').data.filter(({mode}) => mode === 'markers')"
    marks = f"{marked}.map(({{name, x}}) => [name, ...x])"
    assert reader.run(marks) == [["not finite", 21], ["spike: %{y:.5g}", 11]]


def test_the_browser_says_when_a_job_ends_if_it_was_asked_for(reader: Browser, written: Service) -> None:
    job = written.add_job(name="long")
    written.train(job)
    reader.driver.execute_cdp_cmd("Browser.grantPermissions", {"origin": written.url, "permissions": ["notifications"]})
    _open(reader, written, job)
    reader.sees("#notify", "Notify me")
    reader.run(
        "(window.said = [], window.Notification = class extends Notification {"
        " constructor(title, more) { super(title, more); window.said.push([title, more.body]) } }, 1)"
    )
    reader.click("#notify")
    reader.sees("#notify-said", "Keep this page open in a tab.")
    assert reader.run("document.querySelector('#notify').ariaPressed") == "true"
    written.finish(job)
    reader.until(lambda: reader.run("window.said.length"), "the notification")
    [[title, body]] = reader.run("window.said")
    assert title == "long: SUCCEEDED" and body.startswith("Finished after step 100 of 100")
    reader.until(lambda: not reader.run("document.querySelector('#notify').checkVisibility()"), "no button any more")
    reader.driver.execute_cdp_cmd("Browser.resetPermissions", {})
    assert reader.complaints() == []


def test_an_alert_is_set_in_the_page_told_once_by_the_browser_and_shown(reader: Browser, written: Service) -> None:
    job = written.add_job(name="watched")
    written.train(job)
    reader.driver.execute_cdp_cmd("Browser.grantPermissions", {"origin": written.url, "permissions": ["notifications"]})
    _open(reader, written, job)
    reader.click("[data-action=alerts]")
    for text in ("los > 10", "loss > 10"):  # the first is refused, with the names that are near
        reader.fill("#dialog-value", text)
        reader.click("#confirm")
        reader.until(lambda: not reader.run("document.querySelector('#confirm').disabled"), "an answer")
        if text == "los > 10":
            reader.sees("#dialog-error", "there is no 'los'; near it are loss")
    reader.sees("#facts", "Alert loss > 10")
    reader.run(
        "(window.said = [], window.Notification = class extends Notification {"
        " constructor(title, more) { super(title, more); window.said.push([title, more.body]) } }, 1)"
    )
    reader.click("#notify")
    reader.sees("#notify-said", "Keep this page open in a tab.")
    first = written.store.get_job(job.id).status.step + 1
    for step, loss in enumerate([12.0, 13.0], start=first):
        written.report(job, RUNNING, series=(point(step, loss),))
    reader.sees("#facts", f"since step {first}")
    reader.until(lambda: reader.run("window.said.length"), "the notification")
    assert reader.run("window.said") == [["watched: loss > 10", f"Since step {first}."]]
    reader.driver.execute_cdp_cmd("Browser.resetPermissions", {})
    assert all("422" in text for text in reader.complaints())


def test_a_spec_is_shown_and_downloaded_as_yaml_with_what_was_set(reader: Browser, written: Service) -> None:
    job = written.add_job(name="yaml", optimizer={"lr": 1e-7})
    _open(reader, written, job, "spec")
    reader.sees("#spec", "lr: 1.0e-07")
    text = reader.text("#spec")
    assert parse_text(text, SpecFormat.YAML) == job.spec and "schedule" not in text
    assert (
        reader.run("decodeURIComponent(document.querySelector('#download-spec').href)").partition(",")[2].strip()
        == text
    )


def test_a_page_that_nobody_looks_at_gives_its_stream_up_and_is_whole_when_it_is_looked_at(
    reader: Browser, written: Service
) -> None:
    job = written.add_job()
    written.begin(job)
    _report_lines(written, job, 0, 10)
    _open(reader, written, job, "logs")
    reader.sees("#lines", "line 9")
    reader.run(_HIDDEN.format("true"))
    reader.until(
        lambda: reader.run("document.querySelector('#live').textContent") == "paused", "the stream is given up"
    )
    _report_lines(written, job, 10, 2_000)  # more than a stream begins with
    reader.run(_HIDDEN.format("false"))
    reader.sees("#live", "live")
    reader.sees("#lines", "line 1999")
    reader.fill("#log-search", "line ")
    reader.until(lambda: "2,000 of" in reader.text("#log-said"), "no line is missing")
    assert reader.complaints() == []


def test_a_log_has_elements_only_for_lines_near_to_those_in_view(reader: Browser, written: Service) -> None:
    job = written.add_job()
    written.begin(job)
    _report_lines(written, job, 0, 15_000)
    _open(reader, written, job, "logs")
    reader.sees("#lines", "line 14999")
    reader.run("(document.querySelector('#follow').click(), document.querySelector('#lines').scrollTop = 0, 1)")
    reader.until(lambda: reader.run("document.querySelector('#lines').scrollHeight") > 200_000, "older lines are read")
    assert reader.run("document.querySelector('#lines').scrollTop") > 0, "what was in view stays there"
    reader.run("(document.querySelector('#lines').scrollTop = 0, 1)")
    reader.sees("#lines", "line 0\n")
    assert reader.count("#lines .line") < 1_000
    reader.fill("#log-search", "line 77")
    reader.until(lambda: "111 of 15,0" in reader.text("#log-said"), "77, 770 to 779, 7700 to 7799")
    reader.fill("#log-search", "/LINE 77(00|99)$/")
    reader.until(lambda: "2 of 15,0" in reader.text("#log-said"), "7700 and 7799")
    reader.click("#lines .line:first-child a")
    reader.fill("#log-search", "l\b")  # emptied, as a user does
    reader.until(lambda: reader.run("document.activeElement.value") == "", "no word is looked for")
    reader.sees("#lines .chosen", "line 7700")
    reader.sees("#lines", "line 7701")
    reader.fill("#log-search", "/(/")
    reader.sees("#lines", "Invalid regular expression")
    reader.fill("#log-search", "none")
    reader.sees("#lines", "No line passes the filters.")
    assert reader.complaints() == []


def test_the_log_holds_what_the_task_prints_and_events_only_if_they_are_wanted(
    reader: Browser, written: Service
) -> None:
    job = written.add_job()
    _open(reader, written, job, "logs")
    reader.sees("#lines", "The task has printed nothing.")
    written.train(job)
    reader.sees("#lines", "hello from rank 1")
    reader.click("#tab-events")
    reader.sees("#events", "SIGKILL")
    reader.click("#tab-logs")
    assert "SIGKILL" not in reader.text("#lines") and "nothing" not in reader.text("#lines")
    reader.tick("#log-events")
    reader.sees("#lines", "SIGKILL")


def _failed(written: Service) -> JobView:
    job = written.add_job(name="failed", retry={"max_failures": 0})
    written.train(job)
    written.finish(job, EndReason.STORAGE_FAILED, "no space")
    assert written.store.get_job(job.id).status.state is JobState.FAILED
    return job


def _done(written: Service) -> JobView:
    job = written.add_job(name="done")
    written.train(job)
    written.finish(job)
    return job


def _replace(reader: Browser, before: str, after: str) -> None:
    """In the spec of the dialog."""
    field = "document.querySelector('#dialog-value')"
    assert before in reader.run(f"{field}.value")
    event = "new Event('input', { bubbles: true })"
    reader.run(f"({field}.value = {field}.value.replace('{before}', '{after}'), {field}.dispatchEvent({event}), 1)")


@contextmanager
def _clipboard(reader: Browser, written: Service, setting: str) -> Iterator[None]:
    for name in ("clipboard-read", "clipboard-write"):
        asked = {"permission": {"name": name}, "setting": setting, "origin": written.url}
        reader.driver.execute_cdp_cmd("Browser.setPermission", asked)
    try:
        yield
    finally:
        reader.driver.execute_cdp_cmd("Browser.resetPermissions", {})


def _report_lines(written: Service, job: JobView, first: int, end: int) -> None:
    lines = (PendingLog(at=AT + n, rank=0, worker_id="w", stream="stdout", text=f"line {n}") for n in range(first, end))
    written.report(job, RUNNING, logs=tuple(lines))


def _open(reader: Browser, written: Service, job: JobView, tab: str = "overview") -> None:
    reader.open(f"{written.url}/jobs/{job.id}#tab={tab}")
    reader.sees("#title", job.name)
    reader.until(lambda: reader.run(ACTIONS), "the buttons")
    reader.until(lambda: reader.run("document.querySelector('#live').textContent") != "connecting", "the stream")


def _do(reader: Browser, action: str, words: str) -> None:
    reader.click(f'[data-action="{action}"]')
    reader.sees("#dialog-words", words)
    reader.click("#confirm")
