"""One Chromium for all tests of the pages. They are skipped, in words, where none is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.databases import MigratedDatabases
from kit.processes.chromium import Browser, chromium
from kit.processes.server import Server
from kit.requirements import require
from kit.worlds.written_service import Service, written_service


@pytest.fixture(scope="session")
def _browser() -> Iterator[Browser]:
    binary = require("chromium", "chromium", "chromium-browser", "google-chrome")
    driver = require("chromium", "chromedriver")
    with chromium(binary, driver) as running:
        yield running


@pytest.fixture
def browser(_browser: Browser, shoal_server: Server) -> Browser:
    """Logged in at the session's server."""
    with shoal_server.client as client:
        _browser.log_in(f"http://127.0.0.1:{shoal_server.port}{client.session_link().path}")
    _browser.look()
    _browser.complaints()
    return _browser


@pytest.fixture
def written(migrated: MigratedDatabases, tmp_path: Path) -> Iterator[Service]:
    """A service whose jobs a test writes, without a cluster."""
    database = migrated.sqlite(tmp_path / "shoal.db")
    with written_service(database, state_dir=tmp_path, checkpoints=tmp_path / "checkpoints") as running:
        yield running


@pytest.fixture
def stranger(_browser: Browser, written: Service) -> Browser:
    """On the login page of the written service, without a session."""
    _forget(_browser)
    _browser.open(f"{written.url}/docs")
    _browser.until(lambda: _browser.run("location.pathname") == "/login", "the login page")
    _browser.complaints()
    return _browser


@pytest.fixture
def reader(_browser: Browser, written: Service) -> Browser:
    """Logged in at the written service."""
    _forget(_browser)
    with written.client as client:
        _browser.log_in(f"{written.url}{client.session_link().path}")
    _browser.complaints()
    return _browser


def _forget(browser: Browser) -> None:
    """The session and the size of the window of the test before. Cookies are those of the host, whatever the port."""
    browser.look()
    browser.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
