"""One Chromium for all tests of the pages. They are skipped, in words, where none is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.processes.chromium import Browser, chromium
from kit.processes.server import Server
from kit.requirements import require


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
