"""axe-core over each page: no violation of WCAG 2.0 and 2.1, levels A and AA, at four widths, in light and in dark.

A page is loaded once and then resized. The widths are those of a phone and of each range for which the sheets have
rules of their own, which a test checks. In dark only the rules about colours run: the sheets change nothing else in
dark, which a test checks too, so the other rules would report the same as in light. `make test` audits each page once,
on a phone in light; a second of CPU is an audit.

The pages are those of a written service, with a job that trains, one that waits, one that has failed and one that has
ended, so that each state has its badge and its buttons.
"""

from __future__ import annotations

import re
from bisect import bisect
from pathlib import Path

import pytest

from kit.processes.axe import violations
from kit.processes.chromium import Browser
from kit.worlds.written_service import Service
from shoal_api.http.routes import pages
from shoal_api.http.routes.pages import PAGES, PUBLIC_PAGES
from shoal_service.artifact_views import ModelRequest
from shoal_workers.contract.job import EndReason

Views = tuple[tuple[str, int], ...]
STATIC = Path(pages.__file__).parents[1] / "static"
PHONE = (("light", 420),)
OTHER_VIEWS = (("light", 1024), ("light", 2560), ("dark", 420), ("dark", 800))
CHARTS = [".js-plotly-plot"]
NOT_OURS = {"/docs": ["#api"], "/jobs": CHARTS, "/compare": CHARTS, "/sweeps": CHARTS}
"""What libraries draw: Swagger UI, and the charts of Plotly, each of which has a name and a table or text beside it."""


@pytest.fixture
def addresses(written: Service) -> dict[str, str]:
    """Each page, by its address the selector of what is there once it has its data."""
    trains, waits, failed, done = (
        written.add_job(name=name, labels={"sweep": "lr", "lr": lr}, **more)
        for name, lr, more in (
            (
                "trains",
                "1e-3",
                {
                    "annotations": {"notes": "# Why\n- **bold** and `code`\n> [more](https://example.org)"},
                    "islands": {"num": 2, "index": 0},
                },
            ),
            ("waits", "2e-3", {"priority": 3}),
            ("failed", "3e-3", {"retry": {"max_failures": 0}}),
            ("done", "4e-3", {}),
        )
    )
    for job in (trains, failed, done):
        written.train(job)
    written.finish(failed, EndReason.STORAGE_FAILED, "no space")
    written.finish(done)
    with written.client as client:
        client.register_model("speech", ModelRequest(job=done.id))
        client.set_model_alias("default", "speech", "prod", 1)
    tabs = ("overview", "curves", "data", "logs", "workers", "checkpoints", "spec", "events")
    found = {f"/jobs/{job.id}": "#actions button" for job in (waits, failed, done)}
    found |= {f"/jobs/{trains.id}#tab={tab}": f"#panel-{tab}:not([hidden])" for tab in tabs}
    found[f"/jobs/{trains.id}#tab=overview"] = "#islands tr"
    data = {
        "/": ("", "#jobs tr"),
        "/compare": (f"?jobs={trains.id},{done.id}", "#jobs tr"),
        "/sweeps": ("?label=sweep", "#jobs tr"),
        "/models": ("#project=default&model=speech&version=1", "#lineage a"),
        "/docs": ("", "#api .errors-wrapper"),
    }
    found["/sweeps"] = "#sweeps tr"
    for path in (*PAGES, *PUBLIC_PAGES):
        query, there = data.get(path, ("", "main"))
        found[path + query] = there
    return found


def _audit(browser: Browser, home: str, address: str, there: str, views: Views) -> list[str]:
    browser.look(width=views[0][1])
    browser.open(home + address)
    browser.until(lambda: browser.count(there), f"{there} of {address}")
    path = address.partition("?")[0].partition("#")[0]
    excluded = NOT_OURS.get("/jobs" if path.startswith("/jobs/") else path, [])
    found = []
    for scheme, width in views:
        browser.look(width=width, scheme=scheme)
        seen = violations(browser, excluded, colours_only=scheme == "dark")
        found += [f"{address} {scheme} {width}: {one}" for one in seen]
    return found


@pytest.mark.parametrize(
    "views", [pytest.param(PHONE, marks=pytest.mark.first, id="phone"), pytest.param(OTHER_VIEWS, id="others")]
)
def test_no_page_violates_wcag_2_a_or_aa(
    reader: Browser, written: Service, addresses: dict[str, str], views: Views
) -> None:
    violated = []
    reader.block("*/openapi.json")  # Swagger UI, which is not audited, would take 9 s of CPU to draw it
    for address, there in addresses.items():
        if not address.startswith("/login"):  # leads on while there is a session
            violated += _audit(reader, written.url, address, there, views)
    reader.driver.delete_all_cookies()
    violated += _audit(reader, written.url, "/login", "#token", views)
    assert not violated, "\n".join(sorted(set(violated)))


@pytest.mark.first
def test_dark_changes_nothing_but_colours() -> None:
    """Else the rules that do not run in dark could find something there."""
    found = []
    for sheet in STATIC.glob("*.css"):
        _, *dark = sheet.read_text().split("(prefers-color-scheme: dark)")
        for rest in dark:
            block = re.match(r"\s*{\s*:root\s*{([^{}]*)}\s*}", rest)
            assert block is not None, f"{sheet.name} changes other elements than :root in dark"
            found += re.findall(r"([\w-]+)\s*:\s*([^;]+)", block[1])
    assert len(found) > 10
    assert [one for one in found if re.fullmatch(r"--[\w-]+ #[0-9a-f]{6}", " ".join(one).strip()) is None] == []


@pytest.mark.first
def test_each_range_of_widths_that_the_sheets_tell_apart_is_audited() -> None:
    sheets = "".join(sheet.read_text() for sheet in STATIC.glob("*.css"))
    limits = re.findall(r"\((min|max)-width:\s*(\d+)px\)", sheets)
    begins = sorted({int(width) + (kind == "max") for kind, width in limits})
    assert len(begins) >= 3
    assert {bisect(begins, width) for _, width in PHONE + OTHER_VIEWS} == set(range(len(begins) + 1))


@pytest.mark.first
def test_the_audit_sees_what_is_wrong(stranger: Browser) -> None:
    """Else the others could not fail."""
    stranger.run("(document.querySelector('#login label').style.color = 'rgb(250, 250, 250)', 1)")
    stranger.run("(document.documentElement.lang = '', 1)")
    rules = {one.partition(":")[0] for one in violations(stranger, [])}
    assert {"color-contrast", "html-has-lang"} <= rules
    in_dark = {one.partition(":")[0] for one in violations(stranger, [], colours_only=True)}
    assert "color-contrast" in in_dark and "html-has-lang" not in in_dark
