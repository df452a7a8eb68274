"""A test run that ends in the middle of a test with a Ray cluster leaves no process behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.os_processes import session_members
from kit.processes.server import until

_ROOT = Path(__file__).parents[2]
_TEST = "tests/ray/test_training.py"


@pytest.fixture
def suite(wheel_python: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """pytest, with a server and a cluster of its own below tmp_path/run."""
    with (tmp_path / "pytest.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-m", "ray", _TEST, f"--basetemp={tmp_path / 'run'}"],
            cwd=_ROOT,
            env={**os.environ, "SHOALTEST_WHEEL_PYTHON": str(wheel_python)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    yield process
    if process.poll() is None:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("moment", ["the cluster starts", "a job trains"])
@pytest.mark.matrix
def test_an_interrupted_suite_leaves_no_process(
    suite: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    def sessions() -> list[int]:
        notes = list(tmp_path.glob("run/server*/embedded-cluster.json"))
        return list(json.loads(notes[0].read_text())["pids"]) if notes else []

    def commands() -> list[str]:
        return [command for leader in found for command in session_members(leader).values()]

    found = until(sessions, "the cluster starts")
    if moment == "a job trains":
        until(lambda: any(command.startswith("ray::WorkerActor") for command in commands()), "a worker runs")
        found = sessions()
    suite.send_signal(number)
    suite.wait(timeout=120)
    until(lambda: not commands(), "all processes of the cluster are gone")
