"""`shoal demo` and `shoal doctor` from the built wheel, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_api.demo.spec import MIN_STEPS, TOLERANCE

_MAIN = "from shoal_api.cli.main import main; main()"
_SHORT = ("--steps", str(MIN_STEPS + 10))
"""Less than half of the demo's steps: a worker is killed and replaced within them."""
_RELAYOUT = ("--scenario", "relayout")
_LAYOUTS = {_SHORT: ["fsdp4", "fsdp3", "fsdp4"], _RELAYOUT: ["pp2 x tp2", "fsdp3", "pp2 x tp2"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """The command's directory for temporary files. Its path is short, since Ray's sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield Path(folder)


def _shoal(python: Path, folder: Path, *arguments: str) -> tuple[int, Any]:
    """The exit status of a command, and the JSON document that it prints."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SHOAL_", "PYTHON"))}
    done = subprocess.run(
        [python, "-c", _MAIN, *arguments, "--json"],
        cwd=folder,
        env=inherited | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("options", [_SHORT, pytest.param(_RELAYOUT, marks=pytest.mark.matrix)], ids="_".join)
def test_the_demo_recovers_grows_back_and_ends_with_the_losses_of_the_undisturbed_run(
    wheel_python: Path, folder: Path, options: tuple[str, ...]
) -> None:
    status, outcome = _shoal(wheel_python, folder, "demo", *options)
    assert status == 0, outcome
    assert outcome["state"] == "SUCCEEDED"
    assert outcome["steps"] >= MIN_STEPS
    assert outcome["world_sizes"] == [4, 3, 4]
    assert [layout for layout in outcome["layouts"] if layout in _LAYOUTS[options]] == _LAYOUTS[options]
    assert len(outcome["surviving_pids"]) == 3
    assert [incident["cause"] for incident in outcome["incidents"]] == ["worker_died"]
    assert outcome["max_abs_loss_diff"] <= TOLERANCE
    assert [path.name for path in folder.iterdir() if path.name.startswith("shoal-")] == []


def test_the_doctor_finds_everything_that_jobs_need(wheel_python: Path, folder: Path) -> None:
    status, report = _shoal(wheel_python, folder, "doctor", "--url", "http://127.0.0.1:1")
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert status == 0
    assert verdicts.pop("server") == "warn", "no server listens on port 1"
    assert {"ray", "torch", "gloo", "database", "memory"} <= set(verdicts)
    assert "fail" not in verdicts.values()
    assert report["verdict"] == "warn"
