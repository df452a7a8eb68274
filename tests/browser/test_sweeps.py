"""The page of a sweep: what it shows of two jobs and of two hundred; started and stopped there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.sweeps import Measure, Rule, Verdict
from shoal_service.store import sweep_jobs
from shoal_service.views import JobStatus, JobView
from shoal_workers.contract.job import EndReason, JobState

STEPS = 20


def curve(loss: float, steps: int = STEPS) -> tuple[SeriesPoint, ...]:
    return tuple(
        SeriesPoint(
            step=step,
            at=AT + step,
            loss=loss + 1 / step,
            grad_norm=1.0,
            lr=1e-3,
            tokens_per_s=10.0,
            step_s=0.1,
            world_size=1,
            generation=1,
            val_loss=loss if step % 5 == 0 else None,
        )
        for step in range(1, steps + 1)
    )


def add(written: Service, number: int, loss: float, *, steps: int = STEPS) -> JobView:
    labels = {"lr": f"{10 ** (-5 + number % 40 / 10):.3g}", "layers": str(2 + number % 3), "name": "ab"[number % 2]}
    job = written.add_job(name=f"try-{number}", labels=labels, sweep={"name": "rates", "prune": "halving", "limit": 8})
    written.begin(job)
    status = RUNNING.model_copy(update={"step": steps, "loss": loss, "val_loss": loss})
    written.report(job, status, series=curve(loss, steps))
    return job


def prune(written: Service, job: JobView) -> None:
    rule = Rule(Measure.VALIDATION, 5, 20)
    written.store.writing(sweep_jobs.prune)(job.id, "rates", Verdict(10, 9.0, 2.0, 3, 1), rule, now=AT)
    end = AttemptEnd(reason=EndReason.CANCELLED, message="", step=10)
    written.report(job, JobStatus(state=JobState.CANCELLING, step=10, loss=9.0), end=end)


def test_a_sweep_shows_its_curves_and_its_best_and_is_stopped(reader: Browser, written: Service) -> None:
    jobs = [add(written, number, 1.0 + number % 3) for number in range(12)]
    worst = add(written, 12, 9.0, steps=10)
    prune(written, worst)
    reader.open(f"{written.url}/sweeps?label=sweep%3Drates")
    reader.sees("#sweep-title", "rates in default")
    reader.sees("#rules", "best 1/3 at steps 20, 60")
    reader.until(lambda: reader.count("#curves-chart .scatterlayer .trace") == 4, "best, others, pruned and where")
    reader.sees("#curves-words", "13 jobs with values, 1 pruned")
    reader.sees("#best-words", "1.05")
    reader.sees("#jobs", "pruned")
    assert reader.text("#jobs tr:first-child td:nth-child(2)") == "RUNNING best"
    label = reader.run("document.querySelector('#chart').getAttribute('aria-label')")
    assert "Parallel axes of 13 jobs" in label and "lr from" in label
    reader.run("(document.querySelector('#measure').value = 'val_loss', 1)")
    reader.run("document.querySelector('#measure').dispatchEvent(new Event('input'))")
    reader.until(lambda: "1," in reader.text("#best-words"), "the best validation loss")

    reader.click("#stop")
    reader.sees("#dialog-words", "12 jobs of 13 end")
    reader.click("#confirm")
    reader.until(lambda: reader.count("#stop[hidden]") or "CANCELLING" in reader.text("#rules"), "the jobs that end")
    states = {written.store.get_job(job.id).status.state for job in jobs}
    assert states == {JobState.CANCELLING}
    assert reader.complaints() == []


def test_a_sweep_is_started_from_the_page(reader: Browser, written: Service) -> None:
    reader.open(f"{written.url}/sweeps")
    reader.click("#new")
    reader.until(lambda: reader.run("document.activeElement.id") == "values", "the focus is in the values")
    reader.fill("#values", "optimizer.betas: [0.9, 0.95], [0.9, 0.99]\nseed: 1, 2, 3\n")
    reader.sees("#verdict", "6 jobs.")
    reader.fill("#values", "optimizer.lr: 1e-5 .. 1e-2 log\nseed: 1, 2\n")
    reader.sees("#verdict", "A range is drawn from: say how many jobs.")
    reader.fill("#samples", "5")
    reader.fill("#name", "from-the-page")
    reader.fill("#limit", "2")
    reader.sees("#verdict", "5 jobs.")
    reader.click("#submit")
    reader.sees("#sweep-title", "from-the-page in default")
    reader.until(lambda: reader.count("#jobs tr") == 5, "its jobs")
    with written.client as client:
        made = client.sweep("default", "from-the-page")
        specs = [client.job(job.id).spec for job in made.jobs]
    assert (made.limit, len({spec.optimizer.lr for spec in specs})) == (2, 5)
    reader.open(f"{written.url}/sweeps")
    reader.sees("#sweeps [data-sweep=from-the-page]", "0 of 5 jobs")
    assert reader.complaints() == []


def test_the_sweeps_are_listed_with_their_states_and_best_jobs(reader: Browser, written: Service) -> None:
    rated = [add(written, number, 3.0 - number) for number in range(3)]
    prune(written, add(written, 3, 9.0, steps=10))
    over = [written.add_job(name=f"over-{number}", sweep={"name": "over"}, project="speech") for number in range(2)]
    for job in over:
        written.begin(job)
        written.report(job, RUNNING.model_copy(update={"loss": None}))
    written.finish(over[0])
    written.finish(over[1], EndReason.STORAGE_FAILED, "no space")
    for number in range(2):
        written.add_job(name=f"late-{number}", sweep={"name": "late"})
    reader.open(f"{written.url}/sweeps")
    reader.until(lambda: reader.count("#sweeps tr") == 3, "the sweeps")
    assert reader.run("[...document.querySelectorAll('#sweeps tr')].map((one) => one.dataset.sweep)") == [
        "late",
        "over",
        "rates",
    ]
    assert [reader.text(f"#sweeps [data-sweep={name}] .badge") for name in ("late", "over", "rates")] == [
        "QUEUED",
        "SUCCEEDED",
        "RUNNING",
    ]
    shown = reader.text("#sweeps [data-sweep=rates]")
    assert "1 of 4 jobs" in shown and "1 CANCELLED" in shown and "1 validation loss" in shown.replace("\n", " "), shown
    assert "speech" in reader.text("#sweeps [data-sweep=over]") and "took" in reader.text("#sweeps [data-sweep=over]")
    for scheme in ("light", "dark"):
        for width in (420, 1024, 1400):
            reader.look(width=width, scheme=scheme)
            assert reader.run("document.documentElement.scrollWidth") <= width
    written.report(rated[0], RUNNING.model_copy(update={"loss": 0.5, "val_loss": 0.25}))
    reader.sees("#sweeps [data-sweep=rates]", "0.25")
    assert reader.run(f"document.querySelector('#sweeps a[href$=\"{rated[0].id}\"]').textContent") == "try-0"
    reader.click("#sweeps [data-sweep=rates] td.title a")
    reader.sees("#sweep-title", "rates in default")
    assert reader.complaints() == []


@pytest.mark.parametrize("num_jobs", [2, 200])
def test_the_axes_read_well_with_any_number_of_jobs(reader: Browser, written: Service, num_jobs: int) -> None:
    for number in range(num_jobs):
        add(written, number, 1.0 + number % 7)
    for width, scheme in ((420, "light"), (1024, "dark"), (1400, "light"), (2560, "dark")):
        reader.look(width=width, scheme=scheme)
        reader.open(f"{written.url}/sweeps?label=sweep%3Drates&project=default")
        reader.until(lambda: reader.count("#jobs tr") == num_jobs, "the table")
        reader.until(lambda: reader.count("#chart .scatterlayer .trace"), "the axes")
        reader.until(lambda: reader.count("#curves-chart .scatterlayer .trace"), "the curves")
        assert reader.run("document.documentElement.scrollWidth") <= width
        assert reader.count("#chart .scatterlayer .trace") <= 9, "a trace for each colour, not for each job"
        ticks = "[...document.querySelectorAll('#chart .xtick text')].map((one) => one.getBoundingClientRect())"
        boxes = reader.run(f"{ticks}.map((one) => [one.left, one.right])")
        assert len(boxes) >= 6, boxes
        assert all(a[1] <= b[0] for a, b in pairwise(boxes)), "names of axes do not overlap"
    assert reader.complaints() == []
