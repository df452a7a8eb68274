"""The HTML pages: self-contained, loaded from this host only, and safe against text from a job's author."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from shoal_service.core.goodput import Category
from shoal_service.telemetry.metric_names import RecoveryPhase

PAGES = ("/", "/docs")
SCRIPTS = ("/static/jobs.js", "/static/docs.js", "/static/draw.js")
NAMESPACE = "http://www.w3.org/2000/svg"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.ids: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.sources.append(value or "")
            elif name == "id":
                self.ids.add(value or "")
            elif name == "style" or name.startswith("on"):
                self.inline.append(name)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_loads_only_what_this_service_serves(service: Any, path: str) -> None:
    answer = service.http.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    links = Links()
    links.feed(answer.text)
    assert not links.inline, "the policy would block it"
    for source in links.sources:
        if source != "data:,":
            assert source.startswith("/")
            assert service.http.get(source).status_code == 200


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS, "/static/style.css"])
def test_no_page_names_another_host(service: Any, path: str) -> None:
    text = service.http.get(path).text.replace(NAMESPACE, "")
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text)


@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_never_write_markup(service: Any, path: str) -> None:
    text = service.http.get(path).text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc", text)


@pytest.mark.parametrize(("page", "script"), [*zip(PAGES, SCRIPTS, strict=False)])
def test_a_script_finds_every_element_that_it_looks_up(service: Any, page: str, script: str) -> None:
    links = Links()
    links.feed(service.http.get(page).text)
    assert set(re.findall(r'\$\("(\w+)"\)', service.http.get(script).text)) <= links.ids


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the syntax of scripts")
@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_parse(service: Any, tmp_path: Path, path: str) -> None:
    script = tmp_path / "script.js"
    script.write_text(service.http.get(path).text)
    checked = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_every_category_and_phase_has_a_column_and_a_colour(service: Any) -> None:
    script, style = (service.http.get(path).text for path in ("/static/draw.js", "/static/style.css"))
    shown = {name: json.loads(values) for name, values in re.findall(r"^const ([A-Z]+) = (\[.+\]);$", script, re.M)}
    assert shown["CATEGORIES"] == [category.value for category in Category]
    assert shown["PHASES"] == [phase.value for phase in RecoveryPhase if phase is not RecoveryPhase.RECOVERY]
    assert all(f".{name}" in style for name in [*shown["CATEGORIES"], *shown["PHASES"]])


def test_the_pages_stay_small() -> None:
    folder = files("shoal_api.http").joinpath("static")
    lines = {part.name: len(part.read_text().splitlines()) for part in folder.iterdir()}
    assert lines["index.html"] + lines["jobs.js"] + lines["draw.js"] + lines["style.css"] < 350
