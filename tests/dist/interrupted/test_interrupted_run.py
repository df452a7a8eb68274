"""A pytest that is interrupted, ended or killed leaves no process behind; see kit/guard/guard.py."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kit.postgres import MISSING, is_installed
from kit.processes.os_processes import is_alive
from kit.processes.server import until
from kit.requirements import missing, require

_ROOT = Path(__file__).parents[3]
_PROGRAM = "tests/kit/guard/interrupted_run.py"
_SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)

Run = Callable[..., subprocess.Popen[bytes]]


def _started_with(setting: str) -> dict[int, str]:
    """Pid -> command line of the live processes with this setting in their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and setting.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`run(NAME, SETTING=value)`: a pytest in the middle of this test of the program."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, **settings: str) -> subprocess.Popen[bytes]:
        ready = tmp_path / "ready"
        with (tmp_path / "pytest.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pytest", f"{_PROGRAM}::{name}"],
                    cwd=_ROOT,
                    env={**os.environ, "READY": str(ready), **settings},
                    stdout=log,
                    stderr=log,
                )
            )
        until(lambda: ready.exists() or processes[-1].poll() is not None, "the test runs")
        assert processes[-1].poll() is None, (tmp_path / "pytest.log").read_text()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@_SIGNALS
def test_children_and_orphans_end_with_it(run: Run, tmp_path: Path, number: signal.Signals) -> None:
    mark = secrets.token_hex(8)
    pytest_process = run("test_with_children", NAME=mark)
    fork = int((tmp_path / "fork").read_text())
    assert len([pid for pid in _started_with(mark) if pid not in (pytest_process.pid, fork)]) == 2
    pytest_process.send_signal(number)
    pytest_process.wait()
    until(lambda: not _started_with(mark) and not is_alive(fork), "all of them have ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.matrix)],
    ids=lambda number: number.name,
)
def test_a_browser_and_a_database_end_with_it(run: Run, number: signal.Signals) -> None:
    if not is_installed():
        missing("postgres", MISSING)
    mark = secrets.token_hex(8)
    pytest_process = run(
        "test_with_a_browser_and_a_database",
        NAME=mark,
        CHROMIUM=require("chromium", "chromium", "chromium-browser", "google-chrome"),
        CHROMEDRIVER=require("chromium", "chromedriver"),
    )
    commands = " ".join(_started_with(mark).values())
    assert "chromedriver" in commands and "--headless" in commands and "postgres -D" in commands, commands
    pytest_process.send_signal(number)
    pytest_process.wait()
    until(lambda: not _started_with(mark), "all of them have ended")
