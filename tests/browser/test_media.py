"""The section Media of a real job's page, with the worker that logs killed in the middle of the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kit.processes.chromium import Browser
from kit.processes.server import PATIENCE_S, Server, until
from shoal_api.client import Client
from shoal_service.views import JobView
from shoal_workers.contract.job import JobState
from shoal_workers.contract.media import MediaRecord

LOOPS = Path(__file__).parents[1] / "kit" / "loops"
STEPS, GATED = 8, 7
_CHOOSE = (
    "(() => {{ const one = document.getElementById('{}'); one.value = '{}';"
    " one.dispatchEvent(new Event('{}')); return true; }})()"
)
_IMAGES = """[...document.querySelectorAll("#media-images img")].map((one) => one.complete && one.naturalWidth)"""
_DRAWN = """[...document.querySelectorAll("#media-histograms svg > g")].map((one) => Number(one.dataset.step))"""


def submit(client: Client, gate: Path) -> JobView:
    return client.submit(
        {
            "name": "shown",
            "loop": {"file": "shown_gated.py", "args": [str(gate)]},
            "code": {"working_dir": str(LOOPS)},
            "elasticity": {"min_workers": 2, "max_workers": 2},
            "health": {"hang_floor_s": 600.0},
        }
    )


def finish(client: Client, job: JobView) -> None:
    status = client.wait(job.id, timeout_s=PATIENCE_S).status
    assert (status.state, status.step) == (JobState.SUCCEEDED, STEPS), status


def content(client: Client, job: JobView, one: MediaRecord) -> dict[str, Any]:
    """What the record shows, besides its histogram: not when it was written, nor by whom."""
    return {
        "step": one.step,
        "images": [(image.name, client.media_file(job.id, image.file)) for image in one.images],
        "tables": one.tables,
        "texts": one.texts,
        "notes": one.notes,
    }


def histogram_of(one: MediaRecord) -> list[float]:
    [found] = one.histograms
    assert found.name == "head" and found.mean is not None and found.std is not None
    return [found.num_values, sum(found.counts), found.low, found.high, found.mean, found.std]


def shows_step(browser: Browser, step: int, of: int) -> None:
    """Chooses a step on the page, and sees what it has logged, all of it and nothing else."""
    browser.run(_CHOOSE.format("media-step", step - 1, "input"))
    browser.sees("#media-at", f"step {step}, {step} of {of}")
    browser.until(lambda: _is_shown(browser, step), f"all that step {step} has logged")


def _is_shown(browser: Browser, step: int) -> bool:
    """False also while the page, which reads again by itself, replaces what it shows."""
    table = browser.text("#media-tables")
    return (
        f"this is step {step}" in browser.text("#media-texts")
        and f"row of {step}" in table
        and str(step * step) in table
        and browser.run(_IMAGES) == [24]
        and browser.run("document.querySelector('#media-images img')?.alt") == f"fade at step {step}"
        and browser.count("#media-histograms figure") == 1
        and browser.run(_DRAWN) == list(range(1, step + 1))
    )


def test_media_of_all_steps_are_seen_once_though_the_worker_that_logs_is_killed(
    browser: Browser, shoal_server: Server, client: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = submit(client, gate)
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{job.id}#tab=media")
    browser.sees("#media-at", f"of {GATED}")  # the page reads again by itself; the last one is of the step under way
    for step in (1, 4, GATED):
        shows_step(browser, step, of=GATED)

    until(lambda: len([one for one in client.workers(job.id) if one.rank is not None]) == 2, "the ranks are known")
    [victim] = [worker.pid for worker in client.workers(job.id) if worker.rank == 0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: client.incidents(job.id), "the incident")
    gate.touch()
    finish(client, job)
    browser.sees("#media-at", f"of {STEPS}")
    for step in range(1, STEPS + 1):
        shows_step(browser, step, of=STEPS)

    page = client.media(job.id, limit=200)
    assert [one.step for one in page.items] == list(range(1, STEPS + 1)) and page.num_records == STEPS
    assert [one.generation for one in page.items][:-2] == [1] * (GATED - 1)
    assert len({one.generation for one in page.items}) == 2, "the step that was redone has replaced its record"
    undisturbed = submit(client, gate)  # the gate is open
    finish(client, undisturbed)
    expected = client.media(undisturbed.id, limit=200).items
    assert {one.generation for one in expected} == {1}
    for one, other in zip(page.items, expected, strict=True):
        assert content(client, job, one) == content(client, undisturbed, other)
        assert histogram_of(one) == pytest.approx(histogram_of(other), abs=1e-6)
    assert browser.complaints() == []


def test_histograms_are_shown_over_steps_as_heat_map_or_ridges_or_of_one_step(
    browser: Browser, shoal_server: Server, client: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    job = submit(client, gate)
    finish(client, job)
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{job.id}#tab=media")
    shows_step(browser, STEPS, of=STEPS)
    assert browser.count("#media-histograms svg[data-view=map] rect") >= STEPS
    assert f"steps 1 to {STEPS}" in browser.text("#media-histograms figcaption")
    browser.run(_CHOOSE.format("media-view", "ridges", "change"))
    browser.until(lambda: browser.count("#media-histograms path.ridge") == STEPS, "a ridge for each step")
    browser.run(_CHOOSE.format("media-view", "step", "change"))
    browser.until(lambda: browser.count("#media-histograms svg[data-view=step] > g") == 1, "one step")
    [only] = client.media(job.id, step=STEPS).items
    assert browser.run(_DRAWN) == [STEPS] and only.histograms[0].num_values == 32
    assert "steps" not in browser.text("#media-histograms figcaption")
    assert browser.complaints() == []
