"""The page of a job in states that a real run passes quickly or ends in, and the page that compares none."""

from __future__ import annotations

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service
from shoal_service.reports import PendingLog
from shoal_service.store import job_deletion
from shoal_service.views import JobView
from shoal_workers.contract.job import EndReason, JobState

ACTIONS = "[...document.querySelectorAll('#actions button')].map((one) => one.dataset.action)"
TABS = "[...document.querySelectorAll('[data-tab]')].map((one) => one.dataset.tab)"
_HIDDEN = (
    "(Object.defineProperty(document, 'hidden', {{ get: () => {}, configurable: true }}), "
    "document.dispatchEvent(new Event('visibilitychange')), 1)"
)
"""A user looks at another tab, or comes back."""
NAMES = "[...document.querySelectorAll('#vital dt, #facts dt')].map((one) => one.textContent)"


@pytest.mark.slow
def test_a_job_that_has_ended_is_run_again_extended_tried_again_and_deleted_at_its_head(
    reader: Browser, written: Service
) -> None:
    failed = _failed(written)
    _open(reader, written, failed)
    assert reader.run(ACTIONS) == ["retry", "extend", "continue", "again", "export", "delete"]
    _do(reader, "again", "A new job with the same spec")
    reader.until(lambda: failed.id not in reader.run("location.pathname"), "the page of the new job")
    reader.sees("#title", "QUEUED")
    again = written.store.get_job(reader.run("location.pathname").rpartition("/")[2])
    assert again.spec == failed.spec and again.id != failed.id

    _open(reader, written, failed)
    _do(reader, "retry", "goes on from its checkpoint of step 10")
    reader.sees("#title", "QUEUED")
    done = written.add_job(name="done")
    written.train(done)
    written.finish(done)
    _open(reader, written, done)
    assert reader.run(ACTIONS) == ["extend", "continue", "again", "export", "delete"]
    reader.click('[data-action="extend"]')
    reader.fill("#dialog-value", "50")
    reader.sees("#dialog-words", "More than the 100 steps that are done.")
    reader.click("#dismiss")
    _do(reader, "extend", "from its checkpoint of step 10 to step 200")
    reader.until(lambda: written.store.get_job(done.id).spec.stop.steps == 200, "the new end")

    gone = _failed(written)
    _open(reader, written, gone)
    _do(reader, "delete", "This cannot be undone")
    reader.until(lambda: reader.run("location.pathname") == "/", "the page of all jobs")
    assert [one.job_id for one in written.store.reading(job_deletion.newest)(project=None, limit=10, visible=None)] == [
        gone.id
    ]
    assert reader.complaints() == []


def test_a_queued_job_has_no_axes_and_no_heads_of_empty_tables(reader: Browser, written: Service) -> None:
    job = written.add_job()
    _open(reader, written, job, "curves")
    reader.sees("#uncurved", "The curves begin with the first step.")
    assert reader.run("document.querySelector('#curves').clientHeight") == 0
    shown = "[...document.querySelectorAll('section table')].filter((one) => one.checkVisibility()).length"
    for tab in reader.run(TABS):
        reader.click(f"#tab-{tab}")
        assert reader.run(shown) == 0, tab
    reader.click("#tab-overview")
    assert len(reader.run(NAMES)) < 8, "the other facts are behind a line that opens them"
    reader.click("details summary")
    reader.sees("#more-facts", job.id)


def test_the_head_of_a_failed_job_begins_with_its_error_and_the_way_out(reader: Browser, written: Service) -> None:
    _open(reader, written, _failed(written))
    reader.sees("#message", "no space")
    reader.sees("#way-out", "Make checkpoint.url readable and writable again, then Retry.")
    order = "[...document.querySelectorAll('.head [id]')].map((one) => one.id)"
    shown: list[str] = reader.run(order)
    assert shown.index("message") < shown.index("way-out") < shown.index("vital") < shown.index("actions")
    assert reader.run("document.querySelector('#message').className") == "bad"


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


def test_a_task_without_tokens_trains_on_samples(reader: Browser, written: Service) -> None:
    for tokens, name in ((320, "Samples/s"), (320 * 128, "Tokens/s")):
        job = written.add_job()
        written.begin(job)
        written.report(job, RUNNING.model_copy(update={"tokens": tokens}))
        _open(reader, written, job)
        assert name in reader.run(NAMES)


def test_the_page_that_compares_no_jobs_says_how_to_choose_some(reader: Browser, written: Service) -> None:
    reader.open(f"{written.url}/compare")
    reader.sees("main", "has a box at each job")
    assert reader.text("#problem") == "" and reader.run("document.querySelector('#chart').clientHeight") == 0
    reader.open(f"{written.url}/compare?jobs=one")
    reader.sees("#problem", "Choose 2 to 10 jobs, not 1.")


def _failed(written: Service) -> JobView:
    job = written.add_job(name="failed", retry={"max_failures": 0})
    written.train(job)
    written.finish(job, EndReason.STORAGE_FAILED, "no space")
    assert written.store.get_job(job.id).status.state is JobState.FAILED
    return job


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
