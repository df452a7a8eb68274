"""Every page stands open in a tab of its own while a worker of a real job is killed, and while the control plane is.

No page is loaded again: each has a mark that a load would remove. The pages share a job, its kills and a browser, so
that all of it takes a minute. A browser opens six connections to an address, so a few pages share a proxy. `make test`
looks at `MAIN`, since each page costs seconds of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from selenium.common.exceptions import TimeoutException

from kit.processes.chromium import Browser
from kit.processes.proxy import Proxy
from kit.processes.server import Server
from kit.worlds.tiny_jobs import Run, Submit
from shoal_api.http.routes.pages import PAGES
from shoal_workers.contract.job import JobState

KILL_STEP = 8
_PER_PROXY = 4
_HIGH = 2600
"""Parts that are not in view are not drawn."""
_SWEEP = "sweep=kills"
_TABS = "[...document.querySelectorAll('[data-tab]')].map((one) => one.dataset.tab)"
_CELLS = "[...(document.querySelector('{row}')?.cells ?? [])].map((one) => one.innerText)"
_LIVE = "document.getElementById('live')?.textContent ?? ''"
_PALETTE = "document.querySelector('dialog.palette')"
_FOUND = f"[...{_PALETTE}.querySelectorAll('li')].map((one) => one.textContent)"


@dataclass
class Look:
    """A page: what is seen before the kill, and what only after it."""

    path: str
    before: Callable[[Browser, World], object]
    after: Callable[[Browser, World], object]


@dataclass
class World:
    browser: Browser
    looks: dict[str, Look]
    run: Run
    other: Run
    pids: dict[int, int]
    tabs: dict[str, str]
    """By the name of the page: its tab."""

    def at(self, name: str) -> Browser:
        self.browser.use_tab(self.tabs[name])
        return self.browser

    def killed_pid(self) -> int:
        return self.pids[1]


def _row(world: World, table: str) -> str:
    return f'#{table} tr:has(a[href="/jobs/{world.run.id}"])'


def _cells(browser: Browser, world: World, table: str) -> list[str]:
    found: list[str] = browser.run(_CELLS.format(row=_row(world, table)))
    return found


def _cell(browser: Browser, world: World, table: str, head: str) -> str:
    """What stands in the row of the job under a head of the table."""
    heads = f"[...document.querySelector('#{table}').parentElement.tHead.rows[0].cells].map((one) => one.innerText)"
    names: list[str] = browser.run(heads)
    cells = _cells(browser, world, table)
    return cells[next(at for at, name in enumerate(names) if name.startswith(head))] if cells else ""


def _trains(table: str) -> Callable[[Browser, World], object]:
    return lambda browser, world: "RUNNING" in " ".join(_cells(browser, world, table))


def _has_had_one_incident(table: str) -> Callable[[Browser, World], object]:
    return lambda browser, world: _cell(browser, world, table, "Incidents") == "1"


def _curve_passes(curve: str) -> Callable[[Browser, World], object]:
    """A curve of a page of Plotly has points of steps after the kill."""
    return lambda browser, world: max(browser.run(curve) or [0]) > KILL_STEP


def _all_of(*conditions: Callable[[Browser, World], object]) -> Callable[[Browser, World], object]:
    return lambda browser, world: all(condition(browser, world) for condition in conditions)


def _says(selector: str, *texts: str) -> Callable[[Browser, World], object]:
    return lambda browser, world: all(text in browser.text(selector) for text in texts)


def _is(script: str) -> Callable[[Browser, World], object]:
    return lambda browser, world: browser.run(script.replace("JOB", world.run.id))


def _finds_the_job_with_its_state(browser: Browser, world: World) -> object:
    """The search, which every page has, also one that shows no jobs."""
    if not browser.run(f"{_PALETTE}.open"):
        browser.click("#site-search")
        browser.press(world.run.id)
    return any(world.run.id in one and "RUNNING" in one for one in browser.run(_FOUND))


def _pids(browser: Browser) -> set[str]:
    found: list[str] = browser.run(
        "[...document.querySelectorAll('#workers tr')].map((one) => one.cells[6].textContent)"
    )
    return set(found)


_CURVES = "document.querySelector('#{}').data?.flatMap((one) => one.x).filter(Number.isFinite)"
_DRAWN = "document.querySelector('.panel canvas[role=img]')?.dataset.num === '2'"
_LANE = "document.querySelectorAll('#timeline tr[data-id=\"JOB\"] rect title').length"
_STATES = (
    "[...document.querySelectorAll('#timeline tr[data-id=\"JOB\"] rect title')].map((one) => one.textContent).join()"
)
_INCIDENT = "/1 incident/.test(document.querySelector('#runs [data-key=\"JOB\"]')?.innerText)"
_RUN = "Number(document.querySelector('#runs [data-key=\"JOB\"]')?.innerText.match(/(\\d+)(?=, \\d+ incident)/)?.[1])"
_GOES_ON = f"{_RUN} > {KILL_STEP}"
_SERVED: dict[str, Look] = {
    "/": Look("/", _trains("jobs"), _all_of(_trains("jobs"), _has_had_one_incident("jobs"))),
    "/workspace": Look(
        '/workspace?where=label.sweep+%3D%3D+"kills"',
        _is(_DRAWN),
        _is(f"{_GOES_ON} && {_DRAWN} && {_INCIDENT}"),
    ),
    "/compare": Look(
        "/compare?jobs={job},{other}",
        _trains("jobs"),
        _all_of(_trains("jobs"), _has_had_one_incident("jobs"), _curve_passes(_CURVES.format("chart"))),
    ),
    "/sweeps": Look(
        f"/sweeps?label={_SWEEP.replace('=', '%3D')}",
        _trains("jobs"),
        _all_of(_trains("jobs"), _has_had_one_incident("jobs"), _curve_passes(_CURVES.format("curves-chart"))),
    ),
    "/models": Look("/models", _says("main", "No model is registered"), _finds_the_job_with_its_state),
    "/fleet": Look("/fleet", _is(f"{_LANE} > 0"), _is(f"{_LANE} > 2 && /RECOVERING/.test({_STATES})")),
    "/account": Look("/account", _says("#me", "admin"), _finds_the_job_with_its_state),
    "/docs": Look("/docs", _says("#api", "/v1/jobs"), _finds_the_job_with_its_state),
}
_RUNBOOK = Look("/runbook", _says("main", "Runbook"), _says("main", "Runbook"))
_POINTS = "shoalCurves.shown.series?.step ?? []"
_MAP = "document.querySelector('#system-map').data?.[0]"
_TAB_LOOKS: dict[str, Look] = {
    name: Look(f"/jobs/{{job}}#tab={name}", before, after)
    for name, before, after in (
        (
            "overview",
            _says("#calm", "No incidents."),
            _all_of(
                _says("#incidents", "worker died", "2 → 2"),
                _says("#categories", "recovering"),
                _says("#title", "RUNNING"),
                _says("#vital", "2 of 2 granted"),
                _is("shoalCurves.shown.incidents.every((one) => one.closed)"),
            ),
        ),
        (
            "curves",
            _is(f"({_POINTS}).length > 0 && document.querySelectorAll('#curves .scatterlayer .trace').length > 3"),
            _all_of(
                _curve_passes(_POINTS),
                _is("document.querySelector('#curves').data.find((one) => one.name === 'incident').x.length === 1"),
                _is(f"Math.max(...document.querySelector('#curves').data[0].x) > {KILL_STEP}"),
            ),
        ),
        (
            "system",
            _says("#system-said", "2 ranks"),
            _all_of(_says("#system-said", "2 ranks"), _is(f"{_MAP}?.x.some((at) => at.getTime() > window.marked)")),
        ),
        ("data", _says("[data-tab=data]", "What training reads"), _says("[data-tab=data]", "What training reads")),
        ("media", _says("#unlogged", "Nothing was logged"), _says("#unlogged", "Nothing was logged")),
        ("files", _says("#no-files", "No such file"), _says("#no-files", "No such file")),
        ("logs", _says("#lines", "at step 3"), _says("#lines", "at step 12")),
        (
            "workers",
            lambda browser, world: browser.count("#grid .cell.training") == 2,
            lambda browser, world: (
                browser.count("#grid .cell.training") == 2
                and str(world.pids[0]) in _pids(browser)
                and str(world.killed_pid()) not in _pids(browser)
            ),
        ),
        (
            "checkpoints",
            _says("#checkpoints", "committed"),
            _is("document.querySelectorAll('#checkpoints tr').length > 1"),
        ),
        ("spec", _says("#spec", "elasticity"), _says("#spec", "elasticity")),
        ("events", _says("#events", "generation 1: 2 workers"), _says("#events", "SIGKILL")),
    )
}
LOOKS = _SERVED | {"/runbook": _RUNBOOK} | {f"tab {name}": look for name, look in _TAB_LOOKS.items()}
MAIN = ("/", "/workspace", "tab overview", "tab curves", "tab workers", "tab events")
OTHERS = tuple(name for name in LOOKS if name not in MAIN)


@pytest.fixture(
    scope="module",
    params=[pytest.param(MAIN, id="main"), pytest.param(OTHERS, id="others")],
)
def world(
    request: pytest.FixtureRequest, _browser: Browser, shoal_server: Server, submit_for_module: Submit
) -> Iterator[World]:
    """The pages stand open, and then rank 1 is killed. Each step draws all of them, so the job takes few."""
    looks = {name: LOOKS[name] for name in request.param}
    other = submit_for_module(workers=1, steps=8, labels={"sweep": "kills", "seed": "1"}, seed=1)
    strikes = [
        {"at": "step", "rank": 0, "n": 3, "do": "print"},
        {"at": "step", "rank": 0, "n": 6, "do": "hold"},
        {"at": "step", "rank": 1, "n": KILL_STEP, "do": "kill"},
        {"at": "step", "rank": 0, "n": 12, "do": "print"},
    ]
    run = submit_for_module(
        workers=2, min_workers=2, steps=5_000, step_s=0.5, strikes=strikes, labels={"sweep": "kills", "seed": "2"}
    )
    with ExitStack() as stack:
        first = _browser.driver.current_window_handle
        proxies: list[Proxy] = []
        tabs: dict[str, str] = {}
        world = World(_browser, looks, run, other, {}, tabs)
        _browser.complaints()
        other.finish()
        run.wait_at("step-6-0")
        stack.callback(_close, _browser, tabs, first)
        for number, (name, look) in enumerate(looks.items()):
            if number % _PER_PROXY == 0:
                proxies.append(Proxy(shoal_server.port))
                stack.callback(proxies[-1].close)
                _browser.use_tab(first)
                _browser.log_in(f"http://127.0.0.1:{proxies[-1].port}{run.client.session_link().path}")
            path = look.path.format(job=run.id, other=other.id)
            tabs[name] = _browser.add_tab()
            _browser.look(height=_HIGH)
            _browser.open(f"http://127.0.0.1:{proxies[-1].port}{path}")
        for name, look in looks.items():
            browser = world.at(name)
            browser.until(lambda: look.before(browser, world), f"{name} before the kill")  # noqa: B023
            browser.run("(window.marked = Date.now(), 1)")
        world.pids.update(run.pids())
        run.release("step-6-0")
        yield world


def _close(browser: Browser, tabs: dict[str, str], first: str) -> None:
    for handle in tabs.values():
        browser.use_tab(handle)
        browser.driver.close()
    browser.use_tab(first)
    browser.forget()


def _wait_until_whole(browser: Browser) -> list[str]:
    """Wait until the page is live; what is wrong with it: it was loaded again, or a script of it has failed."""
    browser.until(lambda: browser.run(_LIVE) in ("", "live"), "it is live")
    is_same = browser.run("typeof window.marked") == "number"
    return [*(() if is_same else ("it was loaded again",)), *browser.complaints()]


def test_every_page_and_every_tab_of_a_job_is_looked_at(world: World) -> None:
    assert list(_SERVED) == list(PAGES)
    assert world.at(next(name for name in world.looks if name.startswith("tab "))).run(_TABS) == list(_TAB_LOOKS)


def test_each_page_shows_what_is_true_after_a_kill_without_a_reload(world: World) -> None:
    wrong: dict[str, object] = {}
    for name, look in world.looks.items():
        browser = world.at(name)
        try:
            browser.until(lambda: look.after(browser, world), "the page after the kill")  # noqa: B023
            if failures := _wait_until_whole(browser):
                wrong[name] = failures
        except TimeoutException as error:
            wrong[name] = error.msg
    assert wrong == {}


def test_pages_say_that_the_control_plane_is_away_and_go_on_when_it_is_back(world: World, shoal_server: Server) -> None:
    streamed = [name for name in world.looks if name not in ("/account", "/docs", "/runbook")]
    for name in streamed:
        browser = world.at(name)  # one that was hidden opens its stream again
        browser.until(lambda: browser.run(_LIVE) == "live", f"{name} is live")  # noqa: B023
    try:
        shoal_server.kill()
        for name in streamed:
            browser = world.at(name)
            browser.until(lambda: browser.run(_LIVE) in ("reconnecting", "disconnected"), f"{name} says so")  # noqa: B023
            assert browser.run("typeof window.marked") == "number"
    finally:
        shoal_server.start().wait_for_cluster()
    wrong = {name: failures for name in streamed if (failures := _wait_until_whole(world.at(name)))}
    assert wrong == {}


@pytest.mark.parametrize("world", [pytest.param(MAIN, id="main")], indirect=True)
def test_after_both_kills_the_curve_goes_on_and_the_end_of_the_job_is_seen(world: World) -> None:
    step = world.run.now().status.step
    browser = world.at("tab curves")
    browser.until(lambda: max(browser.run(_POINTS)) > step, "the curve goes on")
    points = browser.run(_POINTS)
    assert points == sorted(set(points)), "no step twice; a long curve has means of several steps"
    for name in ("/", "tab overview"):
        browser = world.at(name)
        browser.until(lambda: LOOKS[name].after(browser, world), f"{name} is as it was")  # noqa: B023
    world.run.client.cancel(world.run.id)
    world.run.finish(JobState.CANCELLED)
    world.at("tab overview").sees("#title", "CANCELLED")
    world.at("tab overview").sees("#live", "ended")
