"""The pages at the widths of a small laptop and of a phone, with texts as long as real ones."""

from __future__ import annotations

import pytest

from kit import island_rounds
from kit.processes.chromium import CUT_OFF, Browser
from kit.worlds.written_service import AT, CHECKPOINT, RUNNING, Service
from shoal_service.artifact_views import ModelRequest
from shoal_service.core.endings import AttemptEnd
from shoal_service.views import JobStatus, JobView
from shoal_workers.contract.job import EndReason, JobState

LAPTOP, NARROW_WINDOW, PHONE = 1400, 1024, 420
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(15, 21, 27)"
REASON = (
    "waits for at least 4 workers of 2 CPUs and 1 GPU each; 0 of at least 4 are ready (node 10.0.0.7 has 3 CPUs free, "
    "node 10.0.0.8 has 1 CPU free); the queue is in order of priority"
)
LABELS = {"sweep": "learning-rate", "lr": "3e-4", "weight-decay": "0.1", "team": "speech-recognition", "seed": "1"}
SHOWN = "[...document.querySelectorAll('.wide')].filter((one) => one.clientWidth)"
TOO_WIDE = f"{SHOWN}.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
NARROW = (
    "[...document.querySelectorAll('table.cards')].filter((one) => one.clientWidth && "
    "one.querySelector('tbody').clientWidth < one.closest('.card').clientWidth - 40).map((one) => one.innerText)"
)
NAMELESS = (
    "[...document.querySelectorAll('table.cards tbody td:not(.title, .pick)')].filter((one) => one.clientWidth && "
    "!one.dataset.name).map((one) => one.innerText)"
)
HEADS = (
    "[...document.querySelectorAll('table.cards thead :is(th:not(.pick), td)')].filter((one) => one.clientWidth).length"
)
"""Heads of columns; the box that selects a page of jobs stays."""


@pytest.fixture
def jobs(written: Service) -> list[JobView]:
    """One that trains, one that waits, and one that has failed."""
    trains, waits, failed = (
        written.add_job(name=name, labels=LABELS, user="ada.lovelace", project="speech", **more)
        for name, more in (
            ("language-model-pretraining", {"islands": {"num": 3, "index": 0}}),
            ("waits", {"priority": -10}),
            ("failed", {"retry": {"max_failures": 0}}),
        )
    )
    for job in (trains, failed):
        written.train(job)
    island_rounds.close(written.store, written.epoch, trains.id, 0, [0, 1], now=AT)
    fast = RUNNING.model_copy(update={"step": 123_456, "total_steps": 200_000, "tokens_per_s": 1_234_567.0})
    url = f"/var/lib/shoal/checkpoints/speech/{trains.id}/step-000000123456-a1-g2"
    written.report(trains, fast, checkpoints=(CHECKPOINT.model_copy(update={"step": 123_456, "url": url}),))
    with written.client as client:
        for name in ("acoustic-model-of-all-languages", "speech"):
            client.register_model(name, ModelRequest(job=trains.id, step=123_456))
            client.set_model_alias("speech", name, "candidate-for-production", 1)
    written.begin(waits)
    written.report(waits, JobStatus(state=JobState.WAITING, message=REASON, total_steps=100, desired_workers=4))
    end = AttemptEnd(reason=EndReason.STORAGE_FAILED, message=f"s3://bucket/{'very-long/' * 20} refused it", step=20)
    written.report(failed, fast, end=end)
    return [trains, waits, failed]


def test_the_tables_of_a_laptop_show_all_their_columns(reader: Browser, written: Service, jobs: list[JobView]) -> None:
    reader.look(width=LAPTOP)
    for path, there in _pages(jobs).items():
        reader.open(written.url + path)
        reader.until(lambda there=there: reader.count(there), path)
        assert reader.run(TOO_WIDE) == [], path
    reader.open(f"{written.url}/jobs/{jobs[0].id}#tab=checkpoints")
    reader.until(lambda: reader.count("#checkpoints tr"), "checkpoints")
    heights = reader.run("[...document.querySelectorAll('#checkpoints tr')].map((one) => one.clientHeight)")
    assert max(heights) < 80, "the actions of a checkpoint stand beside each other"
    assert reader.complaints() == []


def test_a_phone_shows_each_row_as_a_card_with_names_and_nothing_is_cut_off(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    for path, there in _pages(jobs).items():
        reader.look(width=PHONE)
        reader.open(written.url + path)
        reader.until(lambda there=there: reader.count(there), path)
        assert reader.run(BACKGROUND) == LIGHT
        assert reader.run("document.documentElement.scrollWidth") <= PHONE, path
        assert reader.run(CUT_OFF) == [], path
        assert reader.run(NARROW) == [] and reader.run(NAMELESS) == [] and reader.run(HEADS) == 0, path
        reader.look(width=PHONE, scheme="dark")
        assert reader.run(BACKGROUND) == DARK
    assert reader.complaints() == []


def _pages(jobs: list[JobView]) -> dict[str, str]:
    """By path what is there once the page has its data."""
    ids = ",".join(job.id for job in jobs)
    return {
        "/": "#jobs tr",
        f"/jobs/{jobs[0].id}": "#incidents tr",
        f"/jobs/{jobs[0].id}#tab=overview": "#islands tr",
        f"/jobs/{jobs[0].id}#tab=workers": "#grid",
        f"/jobs/{jobs[0].id}#tab=checkpoints": "#checkpoints tr",
        f"/compare?jobs={ids}": "#jobs tr",
        "/sweeps?label=sweep": "#jobs tr",
        "/models#project=speech&model=speech&version=1": "#lineage a",
    }


def test_the_chart_of_a_comparison_covers_nothing_after_a_resize(
    reader: Browser, written: Service, jobs: list[JobView]
) -> None:
    plot = "document.querySelector('#chart .main-svg')"
    reader.look(width=LAPTOP)
    reader.open(f"{written.url}/compare?jobs={jobs[0].id},{jobs[2].id}")
    reader.until(lambda: reader.count("#chart .main-svg") and reader.count("#specs tr"), "the chart")
    reader.look(width=LAPTOP - 300)
    reader.until(lambda: reader.run(f"{plot}.getBoundingClientRect().right <= innerWidth"), "the chart is drawn anew")
    below = reader.run("document.querySelector('#specs').closest('section').getBoundingClientRect().top")
    assert reader.run(f"{plot}.getBoundingClientRect().bottom") <= below
