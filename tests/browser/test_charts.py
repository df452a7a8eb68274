"""Every chart that Plotly draws: the buttons that it offers, and what it draws of a curve with one point."""

from __future__ import annotations

from typing import Any

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service, point
from shoal_service.core.system_metrics import SystemSample
from shoal_workers.contract.job import EndReason

LOCAL_BUTTONS = {
    *("Download plot as a PNG", "Download plot as a png", "Zoom", "Pan", "Zoom in", "Zoom out", "Autoscale"),
    *("Reset axes", "Toggle Spike Lines", "Show closest data on hover", "Compare data on hover"),
}
"""Buttons that do something in the page only."""
CHARTS = """[...document.querySelectorAll('.js-plotly-plot')].filter((chart) => chart.offsetWidth).map((chart) => ({
    id: chart.id, buttons: [...chart.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title),
    server: chart._context.plotlyServerURL}))"""
CHOOSE = (
    "(() => {{ const field = document.getElementById('{}'); field.value = '{}';"
    " field.dispatchEvent(new Event('{}')) }})()"
)
"""A user chooses this value of a control; the driver sends no event `input`."""
DOTS = "[...document.querySelectorAll('{} .scatterlayer .points path')].filter((dot) => dot.getBBox().width > 1).length"


def _write(written: Service, *, num_steps: int) -> list[str]:
    """Write three jobs of a sweep that have ended, and return their ids."""
    ids = []
    for number in range(3):
        job = written.add_job(name=f"job-{number}", labels={"sweep": "lr", "lr": f"{number + 1}e-3"})
        written.begin(job)
        samples = (SystemSample(at=AT, generation=1, values={"busy": (0.4, 0.5, 0.6, 0.7)}),)
        series = tuple(point(step, 5.0 - number - step / 10) for step in range(1, num_steps + 1))
        written.report(job, RUNNING, system=samples, series=series)
        written.finish(job, EndReason.FINISHED)
        ids.append(job.id)
    return ids


@pytest.fixture
def charts(written: Service) -> dict[str, set[str]]:
    """The pages with charts, each with the ids of its charts."""
    first, second, _ = _write(written, num_steps=10)
    return {
        f"/jobs/{first}#tab=curves": {"curves"},
        f"/jobs/{first}#tab=system": {"system-map", "system-lines"},
        f"/compare?jobs={first},{second}": {"chart"},
        "/sweeps?label=sweep%3Dlr": {"chart", "curves-chart", "best-chart"},
    }


def test_no_chart_has_a_button_or_an_address_that_sends_it_elsewhere(
    reader: Browser, written: Service, charts: dict[str, set[str]]
) -> None:
    wrong = []
    reader.look(width=1400)
    for address, expected in charts.items():
        reader.open("about:blank")
        reader.open(written.url + address)
        drawn: list[dict[str, Any]] = reader.until(
            lambda expected=expected: _drawn(reader, expected), f"the charts {expected} of {address}"
        )
        for chart in drawn:
            wrong += [f"{address} {chart['id']}: {name}" for name in chart["buttons"] if name not in LOCAL_BUTTONS]
            wrong += [f"{address} {chart['id']}: no button"] if not chart["buttons"] else []
            wrong += [f"{address} {chart['id']}: {chart['server']}"] if chart["server"] else []
    assert wrong == []


def _drawn(reader: Browser, expected: set[str]) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = reader.run(CHARTS)
    return charts if {chart["id"] for chart in charts} == expected else []


def test_a_curve_of_one_point_is_drawn_as_a_dot(reader: Browser, written: Service) -> None:
    first, second, _ = _write(written, num_steps=1)
    reader.look(width=1400)
    unseen = []
    for address, chart, num_dots in (
        (f"/jobs/{first}#tab=curves", "#curves", 3),
        (f"/compare?jobs={first},{second}", "#chart", 4),
        ("/sweeps?label=sweep%3Dlr", "#curves-chart", 3),
    ):
        reader.open("about:blank")
        reader.open(written.url + address)
        reader.until(lambda chart=chart: reader.count(f"{chart} .scatterlayer .trace"), f"the chart of {address}")
        seen = reader.run(DOTS.format(chart))
        unseen += [f"{address}: {seen} dots"] if seen < num_dots else []
    assert unseen == []

    reader.open(f"{written.url}/workspace")
    reader.until(lambda: reader.run("document.querySelector('.panel canvas')?.dataset.num") == "3", "three curves")
    ink = """[...document.querySelectorAll('.panel canvas:not(.over)')].map((canvas) => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4)
          if (Math.max(...data.slice(at, at + 3)) - Math.min(...data.slice(at, at + 3)) > 40) count += 1;
        return count;
    })[0]"""
    reader.until(lambda: reader.run(ink) >= 3 * 9, "a dot of each job in the workspace")


def test_an_address_is_the_view(reader: Browser, written: Service) -> None:
    first, second, _ = _write(written, num_steps=10)
    reader.look(width=1400)
    reader.open(f"{written.url}/workspace")
    drawn = "document.querySelector('.panel canvas')?.dataset.num"
    reader.until(lambda: reader.run(drawn) == "3", "three curves")
    reader.run(CHOOSE.format("axis", "time", "change"))
    reader.run(CHOOSE.format("smoothing", "0.5", "input"))
    reader.click("#runs input[type=checkbox]")
    reader.until(lambda: reader.run(drawn) == "2", "one curve is hidden")
    address = reader.run("location.href")
    reader.open("about:blank")
    reader.open(address)
    reader.until(lambda: reader.run(drawn) == "2", "the same curves")
    values = "['axis', 'smoothing'].map((name) => document.getElementById(name).value)"
    reader.until(lambda: reader.run(values) == ["time", "0.5"], "the same axis and smoothing")

    reader.open(f"{written.url}/compare?jobs={first},{second}&axis=tokens&log=1")
    reader.until(lambda: reader.count("#chart .scatterlayer .trace"), "the curves")
    assert reader.run("[document.getElementById('axis').value, document.getElementById('log').checked]") == [
        "tokens",
        True,
    ]
    titles = "Object.entries(document.getElementById('chart').layout).filter(([key]) => key.startsWith('yaxis'))"
    rows = reader.run(f"{titles}.map(([, axis]) => axis.title.text)")
    assert rows == ["loss", "gradient norm", "learning rate", "tokens/s", "world size"], "no panel without data"
    reader.click("#in-workspace")
    reader.until(lambda: reader.run(drawn) == "2", "both jobs in the workspace")

    zoomed = "document.getElementById('curves').layout?.xaxis.range?.map(Math.round)"
    reader.open(f"{written.url}/jobs/{first}?smoothing=0.3&log=1&zoom=2,6#tab=curves")
    reader.until(lambda: reader.run(zoomed) == [2, 6], "the zoom")
    assert reader.run("document.getElementById('curves').layout.yaxis.type") == "log"
    reader.run("Plotly.relayout('curves', {'xaxis.range[0]': 3, 'xaxis.range[1]': 5})")
    reader.until(lambda: "zoom=3%2C5" in reader.run("location.search"), "the address has the new zoom")
    reader.run(CHOOSE.format("axis", "tokens", "input"))
    reader.until(lambda: reader.run("location.search") == "?smoothing=0.3&log=1&axis=tokens", "another axis, no zoom")
    assert reader.run("location.hash") == "#tab=curves"

    reader.open(f"{written.url}/jobs/{first}#tab=logs&rank=1&search=hello")
    logged = "['log-rank', 'log-search'].map((name) => document.getElementById(name).value)"
    reader.until(lambda: reader.run(logged) == ["1", "hello"], "the filter of the log")
    assert reader.complaints() == []


def test_curves_are_drawn_over_any_metric_and_the_address_keeps_it(reader: Browser, written: Service) -> None:
    jobs = [written.add_job(name=f"run-{number}") for number in range(2)]
    for job in jobs:
        written.begin(job)
        points = [point(step, 9.0 - step) for step in range(1, 7)]
        series = tuple(
            one.model_copy(update={"metrics": {"accuracy": [0.3, 0.1, 0.2][one.step % 3]}}) for one in points
        )
        written.report(job, RUNNING.model_copy(update={"metrics": {"accuracy": 0.3}}), series=series)
    ids = ",".join(job.id for job in jobs)
    reader.look(width=1400)
    accuracies = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3]
    for chart, address in (("curves", f"/jobs/{jobs[0].id}?"), ("chart", f"/compare?jobs={ids}&")):
        reader.open("about:blank")
        reader.open(f"{written.url}{address}#tab=curves")
        drawn = f"document.getElementById('{chart}').data?.find(({{yaxis}}) => yaxis === 'y')"
        reader.until(lambda: reader.run(drawn), f"the curves of {address}")  # noqa: B023
        reader.run(CHOOSE.format("axis", "metrics.accuracy", "input"))
        reader.until(lambda: reader.run(f"{drawn}.x") == accuracies, "the metric as axis")  # noqa: B023
        assert reader.run(f"document.getElementById('{chart}').layout.xaxis.title.text") == "accuracy"
        reader.run("location.reload()")
        reader.until(lambda: reader.run(f"{drawn}?.x") == accuracies, "the same view again")  # noqa: B023
        assert "axis=metrics.accuracy" in reader.run("location.search")

    reader.open(f"{written.url}/workspace")
    label = "document.querySelector('.panel canvas')?.getAttribute('aria-label')"
    reader.until(lambda: reader.count("#axis option[value='metric.accuracy']"), "the metric is offered")
    reader.click("#axis option[value='metric.accuracy']")
    words = "loss over metric.accuracy: 2 curves, from 0.1 to 0.3"
    reader.until(lambda: reader.run(label) == words, words)
    address = reader.run("location.href")
    reader.open("about:blank")
    reader.open(address)
    reader.until(lambda: reader.run(label) == words, "the same view again")
    assert reader.run("document.getElementById('axis').value") == "metric.accuracy"
    assert reader.complaints() == []


def test_a_run_has_its_colour_on_every_page_and_runs_that_share_one_differ_in_their_dashes(
    reader: Browser, written: Service
) -> None:
    jobs = [written.add_job(name=f"run-{number}") for number in range(12)]
    for number, job in enumerate(jobs):
        written.begin(job)
        written.report(job, RUNNING, series=tuple(point(step, 5.0 + number - step / 10) for step in range(1, 11)))
    reader.look(width=1400)
    reader.open(f"{written.url}/workspace")
    reader.until(lambda: reader.run("document.querySelector('.panel canvas')?.dataset.num") == "12", "the curves")
    dots = (
        "[...document.querySelectorAll('#runs li')].map((one) => [one.dataset.key, one.querySelector('[type=color]')])"
    )
    looks: dict[str, list[str]] = {
        key: look for key, *look in reader.run(f"{dots}.map(([key, {{value, dataset}}]) => [key, value, dataset.dash])")
    }
    assert len({tuple(look) for look in looks.values()}) == 12, "no two look alike"
    some = [job.id for job in jobs[3:6]]
    reader.open(f"{written.url}/compare?jobs={','.join(some)}")
    reader.until(lambda: reader.count("#chart .scatterlayer .trace"), "the curves")
    lines = "document.getElementById('chart').data.filter(({yaxis}) => yaxis === 'y').map(({line}) => line.color)"
    assert reader.run(lines) == [looks[key][0] for key in some]
    reader.press("?")
    reader.sees("dialog.help", "with the pointer in a chart: zoom")
    assert reader.complaints() == []
