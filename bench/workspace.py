"""The workspace in a real browser: 200 jobs of 100,000 steps in 8 panels, from the address to the picture, and what a
user does there.

    python bench/workspace.py [--jobs 200] [--steps 100000] [--rounds 5]

One job is reported to the store step by step, so the service makes its roll-ups; the others are copies of its rows with
other numbers, and of their steps only the last thousand, as after retention. The HTTP edge is that of `shoal serve`.

first paint    from the navigation to the first frame with all curves, and to that with all their points:
               `performance.mark` of the page; in a profile of the browser that knows nothing, at a service that has
               just started (first visit) and at one that has answered this before (new profile), and on later visits
interaction    from a real key or movement of the pointer to the next frame: the longest `event` entry of a
               PerformanceObserver (Event Timing, rounded to 8 ms by the browser; one below 16 ms counts as 16)
jobs           GET /v1/overview, the first 50 jobs with their small curves, which the page of all jobs reads
Plotly         the same curves as SVG by the plotly.js that other pages use: one `Plotly.react` of all panels

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from sqlalchemy import text

from api.reads import Attempt, http_edge, point
from kit.processes.chromium import Browser, chromium
from measurements.machine import describe
from shoal_api.client import Client
from shoal_service.fleet_views import Panel, TableView, Workspace
from shoal_service.store import Store
from shoal_service.store.database import series, series_rollups
from shoal_service.store.job_lists import put_view

METRICS = ("loss", "val_loss", "tokens_per_s", "grad_norm", "lr", "world_size", "metric.accuracy", "metric.perplexity")
_AT_ONCE = 2_000
_KEPT_STEPS = 1_000
_OBSERVE = """
window.slow = [];
new PerformanceObserver((list) => { for (const one of list.getEntries()) window.slow.push([one.name, one.duration]); })
  .observe({ type: "event", durationThreshold: 16, buffered: false });
"""
_DRAWN = "performance.getEntriesByName('workspace-drawn')"
_COARSE = "performance.getEntriesByName('workspace-coarse')"
_PLOTLY = """
const done = arguments[arguments.length - 1], [url, jobs, panels] = arguments;
const script = document.createElement("script");
script.src = url;
script.onload = async () => {
  const holder = document.createElement("div"), begun = performance.now();
  document.body.append(holder);
  for (let panel = 0; panel < panels; panel += 1) {
    const box = document.createElement("div");
    holder.append(box);
    const traces = Array.from({ length: jobs }, (_, job) => ({ type: "scatter", mode: "lines",
      x: Array.from({ length: 195 }, (_, at) => at),
      y: Array.from({ length: 195 }, (_, at) => Math.sin(at / 30) + job / 9 + at % 7 / 9) }));
    await window.Plotly.react(box, traces, { width: 400, height: 240, showlegend: false });
  }
  const drawn = performance.now();
  await Promise.all([...holder.children].map((box) => window.Plotly.relayout(box, { "xaxis.range": [40, 90] })));
  done([drawn - begun, performance.now() - drawn]);
};
document.head.append(script);
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if programs[0] is None or programs[1] is None:
        raise SystemExit("chromium and chromedriver are not installed: nothing was measured.")
    machine = describe()
    print(f"{machine['cpu']}, {machine['system']}; load {_load()}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        url = f"sqlite:///{folder}/shoal.db"
        store = Store.open(url)
        begun_mono = time.monotonic()
        _fill(store, arguments.jobs, arguments.steps)
        print(f"{arguments.jobs} jobs of {arguments.steps:,} steps written in {time.monotonic() - begun_mono:.0f} s")
        with http_edge(store, url) as edge:
            address = f"http://127.0.0.1:{edge.port}"
            token = edge.headers["Authorization"].removeprefix("Bearer ")
            for name in ("first_visit", "new_profile"):
                with chromium(programs[0], programs[1]) as tab:
                    _enter(tab, address, token)
                    found[name] = _visit(tab, address, arguments.jobs)
                    if name == "new_profile":
                        found |= _paint(tab, address, arguments.jobs, arguments.rounds)
                        found |= _interact(tab, arguments.rounds) | _plotly(tab, address, arguments.jobs)
                print(f"{name}: all curves {found[name][0]} ms, all points {found[name][1]} ms; load {_load()}")
            found["jobs_p50_ms"] = _jobs_ms(address, token, arguments.rounds)
        store.close()
    print(json.dumps({"jobs": arguments.jobs, "steps": arguments.steps, "machine": machine, "load": _load(), **found}))


def _load() -> str:
    """Programs that ran or waited for a core in the last minute, on average: this one's and others'."""
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _jobs_ms(address: str, token: str, rounds: int) -> float:
    times_s = []
    with Client(address, token=token) as client:
        for _ in range(rounds):
            begun_mono = time.monotonic()
            assert len(client.overview_of_all(limit=50).items) == 50
            times_s.append(time.monotonic() - begun_mono)
    found = round(statistics.median(times_s) * 1e3, 1)
    print(f"GET /v1/overview, 50 jobs with small curves: p50 {found} ms, longest {max(times_s) * 1e3:.1f} ms")
    return found


def _enter(tab: Browser, address: str, token: str) -> None:
    """Log in. The page that this leads to is left alone until it has all it asks for."""
    tab.look(width=2560, height=1400)
    with Client(address, token=token) as client:
        tab.log_in(f"{address}{client.session_link().path}")
    tab.open(f"{address}/")
    tab.sees("#live", "live")


def _fill(store: Store, num_jobs: int, num_steps: int) -> None:
    first = Attempt(store, "job-0", labels={"team": "team-0"})
    for begin in range(1, num_steps, _AT_ONCE):
        last = min(begin + _AT_ONCE - 1, num_steps)
        first.report(step=last, series=tuple(point(step) for step in range(begin, last + 1)))
    for number in range(1, num_jobs):
        Attempt(store, f"job-{number}", labels={"team": f"team-{number % 8}"}).report(step=num_steps)
    with store.write() as tx:
        [source, *others] = tx.execute(text("SELECT num FROM jobs ORDER BY num")).scalars()
        for number, num in enumerate(others, 1):
            for table, more in (
                (series_rollups, ""),
                (series, f" AND step > {num_steps - _KEPT_STEPS}"),
            ):
                names = [column.name for column in table.columns]
                changed = {
                    "job_num": str(num),
                    "loss": f"loss * {1 + number / num_jobs} + (step * {number}) % 89 / 900.0",
                    "grad_norm": f"grad_norm * {1 + number / 50} + (step * {number}) % 31 / 90.0",
                    "tokens_per_s": f"tokens_per_s * {1 + number / 40}",
                    "lr": f"lr * {1 + number / 30}",
                }
                values = ", ".join(changed.get(name, f'"{name}"') for name in names)
                tx.execute(
                    text(f"INSERT INTO {table.name} SELECT {values} FROM {table.name} WHERE job_num = {source}{more}")
                )
        panels = tuple(Panel(y=name) for name in METRICS)
        put_view(tx, "default", "bench", TableView(workspace=Workspace(panels=panels)), by="bench", now=time.time())


def _visit(tab: Browser, address: str, num_jobs: int) -> tuple[int, int]:
    """Return the milliseconds until all curves are drawn, and until they have all their points."""
    tab.open("about:blank")
    tab.open(f"{address}/workspace?view=default%2Fbench")
    whole = f".find((one) => one.detail === {num_jobs * len(METRICS)})"
    tab.until(lambda: tab.run(f"Boolean({_DRAWN}{whole})"), "all points")
    first_ms = tab.run(f"[...{_COARSE}, ...{_DRAWN}]{whole}.startTime")
    return round(first_ms), round(tab.run(f"{_DRAWN}{whole}.startTime"))


def _paint(tab: Browser, address: str, num_jobs: int, rounds: int) -> dict[str, Any]:
    visits = [_visit(tab, address, num_jobs) for _ in range(rounds)]
    parts = tab.run(
        "performance.getEntriesByType('resource').filter((one) => one.name.includes('/v1/curves?'))"
        ".map((one) => [one.responseEnd - one.requestStart, one.encodedBodySize])[1]"
    )
    first, whole = (sorted(times) for times in zip(*visits, strict=True))
    print(
        f"later visits, {num_jobs * len(METRICS):,} curves: "
        f"p50 {statistics.median(first):.0f} ms, longest {first[-1]} ms; "
        f"all points: p50 {statistics.median(whole):.0f} ms, longest {whole[-1]} ms; their request: {parts[0]:.0f} ms, "
        f"{parts[1] / 1e6:.2f} MB"
    )
    return {
        "paint_later_p50_ms": statistics.median(first),
        "paint_later_max_ms": first[-1],
        "points_later_p50_ms": statistics.median(whole),
        "points_later_max_ms": whole[-1],
        "curves_later_ms": round(parts[0]),
        "curves_mb": round(parts[1] / 1e6, 2),
    }


def _interact(tab: Browser, rounds: int) -> dict[str, Any]:
    tab.driver.execute_script(_OBSERVE)
    canvas = tab.driver.find_element(By.CSS_SELECTOR, ".panel canvas")
    actions = {
        "zoom": lambda: canvas.send_keys("+"),
        "pan": lambda: canvas.send_keys(Keys.ARROW_LEFT),
        "whole": lambda: canvas.send_keys("0"),
        "point": lambda: ActionChains(tab.driver).move_to_element(canvas).move_by_offset(30, 9).perform(),
        "hide": lambda: tab.click("#runs li:first-child input[type=checkbox]"),
        "log": lambda: tab.click(".panel .acts button:nth-child(5)"),
        "smooth": lambda: tab.driver.find_element(By.ID, "smoothing").send_keys(Keys.ARROW_RIGHT),
    }
    took: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, act in actions.items():
            before = tab.run(f"{_DRAWN}.length")
            tab.run("window.slow.splice(0).length")
            act()
            if name != "point":
                tab.until(lambda: tab.run(f"{_DRAWN}.length") > before, name)  # noqa: B023
            # Entries come with the frame after the one that they are about.
            tab.driver.execute_async_script(
                "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 30)))"
            )
            took[name].append(max((duration for _, duration in tab.run("window.slow")), default=16.0))
    middle = {name: statistics.median(times) for name, times in took.items()}
    shown = ", ".join(f"{name} {middle[name]:.0f} ({max(times):.0f})" for name, times in took.items())
    print(f"interaction, p50 (longest) in ms: {shown}")
    found = {f"{name}_ms": [middle[name], max(times)] for name, times in took.items()}
    longest = max(max(times) for times in took.values())
    print(f"the longest interaction: {longest:.0f} ms; load {_load()}")
    return found | {"interaction_p50_max_ms": max(middle.values()), "interaction_longest_ms": longest}


def _plotly(tab: Browser, address: str, num_jobs: int) -> dict[str, Any]:
    tab.open(f"{address}/compare")
    url = tab.run("[...document.scripts].map((one) => one.src).find((one) => one.includes('plotly'))")
    tab.driver.set_script_timeout(300)
    drawn_ms, zoomed_ms = tab.driver.execute_async_script(_PLOTLY, url, num_jobs, len(METRICS))
    print(f"the same number of curves by Plotly: {drawn_ms:.0f} ms, a zoom of all panels {zoomed_ms:.0f} ms")
    return {"plotly_draw_ms": round(drawn_ms), "plotly_zoom_ms": round(zoomed_ms)}


if __name__ == "__main__":
    main()
