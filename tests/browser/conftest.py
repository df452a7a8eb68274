"""One Chromium for all tests of the pages. They are skipped, in words, where none is installed."""

from __future__ import annotations

import socket
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
        running.forget()
        yield running


@pytest.fixture
def browser(_browser: Browser, shoal_server: Server) -> Iterator[Browser]:
    """Logged in at the session's server."""
    with shoal_server.client as client:
        _browser.log_in(f"http://127.0.0.1:{shoal_server.port}{client.session_link().path}")
    yield _browser
    _browser.forget()


@pytest.fixture(scope="session")
def address() -> Iterator[socket.socket]:
    """Where the services of all tests listen, one after the other: the browser has their scripts in its cache."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def written(migrated: MigratedDatabases, tmp_path: Path, address: socket.socket) -> Iterator[Service]:
    """A service whose jobs a test writes, without a cluster."""
    database = migrated.sqlite(tmp_path / "shoal.db")
    checkpoints = tmp_path / "checkpoints"
    with written_service(database, state_dir=tmp_path, checkpoints=checkpoints, address=address) as running:
        yield running


@pytest.fixture
def stranger(_browser: Browser, written: Service) -> Iterator[Browser]:
    """On the login page of the written service, without a session."""
    _browser.open(f"{written.url}/docs")
    _browser.until(lambda: _browser.run("location.pathname") == "/login", "the login page")
    _browser.complaints()
    yield _browser
    _browser.forget()


@pytest.fixture
def reader(_browser: Browser, written: Service) -> Iterator[Browser]:
    """Logged in at the written service."""
    with written.client as client:
        _browser.log_in(f"{written.url}{client.session_link().path}")
    yield _browser
    _browser.forget()
