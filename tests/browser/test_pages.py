"""The pages in a real browser during a real run: a worker is killed, the job is scaled, the stream breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.chromium import Browser
from kit.processes.proxy import Proxy
from kit.processes.server import Server
from kit.worlds.tiny_jobs import Submit, holds
from shoal_api.client import Client
from shoal_workers.contract.job import JobState

MANY_STEPS = 2_000
"""A job that is about to end is not given more workers."""


@pytest.fixture
def proxy(shoal_server: Server) -> Iterator[Proxy]:
    running = Proxy(shoal_server.port)
    yield running
    running.close()


def test_a_page_follows_a_job_through_an_incident_a_scale_and_a_broken_stream(
    browser: Browser, proxy: Proxy, submit: Submit, client: Client
) -> None:
    kill = {"at": "step", "rank": 1, "n": 6, "do": "kill"}
    run = submit(workers=2, min_workers=2, steps=MANY_STEPS, strikes=[*holds(4, 10, 14, 18), kill])
    run.wait_at("step-4-0")
    browser.log_in(f"http://127.0.0.1:{proxy.port}{client.session_link().path}")
    browser.open(f"http://127.0.0.1:{proxy.port}/jobs/{run.id}")
    browser.sees("#title", "RUNNING")
    browser.until(lambda: browser.count("#grid .cell.training") == 2, "two ranks")
    browser.sees("#sentence", "Trains with 2 workers at step 3 of 2,000")
    browser.click("#tab-curves")
    browser.until(lambda: browser.count("#curves .scatterlayer") > 0, "the chart is drawn")
    assert browser.run("location.hash") == "#tab=curves"
    browser.click("#tab-overview")
    assert "No incidents." in browser.text("#calm")

    run.release("step-4-0")  # rank 1 is killed in step 6
    browser.sees("#incidents", "worker died")
    run.wait_at("step-10-0")
    browser.until(lambda: "2 → 2" in browser.text("#incidents"), "the incident is closed")
    assert browser.run("shoalCurves.shown.incidents.length") == 1

    browser.click('[data-action="scale"]')
    browser.fill("#dialog-value", "3")
    browser.sees("#dialog-words", "At most 3 workers instead of 2")
    browser.sees("#dialog-words", "no step is lost")
    browser.click("#confirm")
    run.wait_for_event("generation.switching")
    run.release("step-10-0")
    run.wait_at("step-14-0")
    browser.until(lambda: browser.count("#grid .cell.training") == 3, "the world grows to three ranks")
    assert client.job(run.id).spec.elasticity.max_workers == 3
    browser.click("#tab-spec")
    browser.sees("#changes", "elasticity.max_workers")
    browser.click("#tab-curves")

    proxy.cut()
    browser.until(lambda: browser.text("#live") in ("reconnecting", "disconnected"), "the stream is broken")
    run.release("step-14-0")
    run.wait_at("step-18-0")
    assert browser.run("shoalCurves.shown.series.step.at(-1)") < 17, "nothing arrives over a broken stream"
    proxy.mend()
    browser.sees("#live", "live")
    browser.until(lambda: browser.run("shoalCurves.shown.series.step.at(-1)") == 17, "what was missed arrives")
    assert browser.run("shoalCurves.shown.series.step") == list(range(1, 18)), "each step once"

    client.cancel(run.id)
    run.finish(JobState.CANCELLED)
    browser.sees("#title", "CANCELLED")
    browser.sees("#live", "ended")
    assert browser.complaints() == []


def test_each_metric_of_the_task_has_a_row_of_the_chart(
    browser: Browser, shoal_server: Server, submit: Submit, client: Client
) -> None:
    run = submit(workers=2, steps=6, data_more={"metrics": True}, checkpoint={"every_steps": 4, "tensorboard": True})
    run.finish()
    [file] = Path(client.checkpoints(run.id)[0].url).parent.glob("tensorboard/events.out.tfevents.*")
    assert b"metrics/loss/double" in file.read_bytes()
    points = client.series(run.id)
    assert [point.metrics["loss/double"] for point in points] == pytest.approx([2 * point.loss for point in points])
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{run.id}#tab=curves")
    axes = "Object.entries(document.querySelector('#curves').layout || {}).filter(([name]) => name.startsWith('yaxis'))"
    titles = f"{axes}.map(([, axis]) => axis.title.text)"
    browser.until(lambda: browser.run(titles)[-2:] == ["loss/double", "size"], "a row for each metric")
    drawn = "document.querySelector('#curves').data.find((trace) => trace.name === 'size').y"
    assert browser.run(drawn) == [2] * 6
    assert browser.complaints() == []


def test_all_jobs_are_found_searched_and_compared(
    browser: Browser, shoal_server: Server, submit: Submit, client: Client
) -> None:
    first, second = (
        submit(workers=1, steps=8, labels={"sweep": "seed", "seed": str(seed)}, seed=seed) for seed in (1, 2)
    )
    for run in (first, second):
        run.finish()
    home = f"http://127.0.0.1:{shoal_server.port}"
    browser.open(f"{home}/?label=sweep%3Dseed")
    browser.until(lambda: browser.count("#jobs tr") == 2, "the two jobs of the sweep")
    browser.fill("#search", first.id)
    rows = "[...document.querySelectorAll('#jobs tr')].map((row) => row.dataset.id)"
    browser.until(lambda: browser.run(rows) == [first.id], "the job searched for")
    assert "SUCCEEDED" in browser.text("#jobs") and "8 / 8" in browser.text("#jobs")

    browser.click("#new")
    browser.sees("#verdict", "The spec is valid.")
    browser.until(lambda: browser.count("#plan tr") > 0, "predicted layouts")
    browser.run("(document.querySelector('#yaml').value = 'stop: {steps: 0}', 1)")
    browser.run("document.querySelector('#yaml').dispatchEvent(new Event('input'))")
    browser.sees("#verdict", "stop.steps")

    browser.open(f"{home}/compare?jobs={first.id},{second.id}")
    browser.sees("#specs", "seed")
    browser.until(lambda: browser.count("#chart .scatterlayer .trace") >= 2, "the curves of both jobs")
    browser.sees("#jobs", "in 8 steps")

    browser.open(f"{home}/sweeps?label=sweep%3Dseed")
    browser.until(lambda: browser.count("#jobs tr") == 2, "the table of the sweep")
    browser.until(lambda: browser.count("#chart .scatterlayer .trace") == 2, "parallel coordinates")
    browser.open(f"{home}/sweeps")
    browser.sees("#sweeps [data-sweep=seed]", "2 of 2 jobs")
    assert browser.complaints() == []


def test_an_unknown_job_says_so_and_the_documentation_is_served_offline(browser: Browser, shoal_server: Server) -> None:
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/job-0")
    browser.sees("#missing", "There is no job job-0.")
    browser.complaints()  # the browser logs each 404
    browser.open(f"http://127.0.0.1:{shoal_server.port}/docs")
    browser.sees("#api", "/v1/jobs/{job_id}/overview")
    assert browser.complaints() == []
