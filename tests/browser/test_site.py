"""The documentation site: every page is in it, no link is broken, nothing comes from elsewhere, and search works from
the folder without a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes.chromium import Browser
from kit.processes.server import until

ROOT = Path(__file__).resolve().parents[2]
_LOADED = re.compile(
    r'<(?:script|img|iframe|link rel="?(?:stylesheet|preload|icon)"?)\b[^>]*(?:src|href)="?(https?:[^"> ]+)'
)


def _build(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as `make site` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = _build(out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages = {  # a README stands for its folder
        (path.with_name("index") if path.stem == "README" else path).with_suffix(".html").as_posix() for path in sources
    }
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert pages - built == set()
    navigation = (site / "index.html").read_text("utf-8")
    assert [
        page for page in sorted(pages) if f'href="{page}"' not in navigation and f"href={page}" not in navigation
    ] == []


def test_links_to_files_of_the_repository_lead_to_copies(site: Path) -> None:
    page = (site / "ray-cluster.html").read_text("utf-8")
    assert re.search(r'href="?source/deploy/ray\.env', page)
    assert (site / "source" / "deploy" / "ray.env").read_bytes() == (ROOT / "deploy" / "ray.env").read_bytes()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = {url for path in site.rglob("*.html") for url in _LOADED.findall(path.read_text("utf-8"))}
    assert loaded == set()
    assert not [path for path in site.rglob("*.html") if 'class="mermaid"' in path.read_text("utf-8")]


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# Page\n\n[elsewhere](nowhere.md) [there](page.md#no-such-heading)\n")
    config = (
        (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[0].replace("docs_dir: docs", f"docs_dir: {docs}")
    )
    own = tmp_path / "mkdocs.yml"
    own.write_text(config.replace("hooks: [tools/site_hooks.py]\n", ""))
    done = _build(tmp_path / "out", "--config-file", str(own))
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr and "no-such-heading" in done.stderr


def test_search_finds_a_page_without_a_server(site: Path, _browser: Browser) -> None:
    browser = _browser
    browser.open((site / "index.html").as_uri())
    field = browser.driver.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys("suspected and dead nodes")

    def is_found() -> bool:
        links = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        return any("ray-cluster.html" in link for link in browser.driver.execute_script(links))

    until(is_found, "the search has the page with this heading")
    assert browser.complaints() == []
    browser.forget()
