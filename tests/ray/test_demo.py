"""`shoal demo` and `shoal doctor` from the built wheel, as a user runs them; and the dashboards, with what a real
Prometheus has scraped from the demo's server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.processes.prometheus import History, start_prometheus
from kit.processes.server import until
from kit.requirements import missing
from shoal_api.demo.show import MIN_STEPS, TOLERANCE
from shoal_service.core.access import ADMIN_TOKEN_FILE

pytestmark = pytest.mark.timeout(900)
_DEMO_S = 600
"""Far more than a demo takes on two free cores."""
_MAIN = "from shoal_api.cli.main import main; main()"
_SHORT = ("--steps", str(MIN_STEPS + 10))
"""Less than half of the demo's steps: a worker is killed and replaced within them."""
_RELAYOUT = ("--scenario", "relayout")
_LAYOUTS = {_SHORT: ["fsdp4", "fsdp3", "fsdp4"], _RELAYOUT: ["pp2 x tp2", "fsdp3", "pp2 x tp2"]}


@dataclass(frozen=True)
class Demo:
    """A finished run of the demo."""

    status: int
    outcome: Any
    left: list[str]
    """Files of the demo that it did not remove."""
    history: History | None
    """None: Prometheus is not installed."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """The command's directory for temporary files. Its path is short, since Ray's sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def short_demo(wheel_python: Path) -> Iterator[Demo]:
    """With a Prometheus, if it is installed, that scrapes the server from its first second to its last."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="d", dir="/tmp")))
        started_at = time.time()
        errors = stack.enter_context((folder / "stderr").open("wb"))
        demo = subprocess.Popen(
            _command(wheel_python, "demo", *_SHORT),
            cwd=folder,
            env=_environment(folder),
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        stack.callback(_end, demo)

        def url() -> Any:
            assert demo.poll() is None, (folder / "stderr").read_text()
            return re.search(r"serving on (http://[\d.:]+)", (folder / "stderr").read_text())

        target = until(url, "the demo names its server")[1]
        [state_dir] = folder.glob("shoal-demo-*")
        watcher = start_prometheus(target, folder / "prometheus", state_dir / "state" / ADMIN_TOKEN_FILE)
        if watcher is not None:
            stack.enter_context(watcher)
        try:
            output, _ = demo.communicate(timeout=_DEMO_S)
        except subprocess.TimeoutExpired:
            _end(demo)
            output, _ = demo.communicate()
        assert output, (folder / "stderr").read_text()
        yield Demo(
            status=demo.returncode,
            outcome=json.loads(output),
            left=[path.name for path in folder.iterdir() if path.name.startswith("shoal-")],
            history=History(watcher.url, started_at, time.time()) if watcher is not None else None,
        )


def _command(python: Path, *arguments: str) -> list[str]:
    return [str(python), "-c", _MAIN, *arguments, "--json"]


def _environment(folder: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SHOAL_", "PYTHON"))}
    return inherited | {"TMPDIR": str(folder)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM ends the demo with everything that it has started."""
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def _shoal(python: Path, folder: Path, *arguments: str) -> tuple[int, Any]:
    """The exit status of a command, and the JSON document that it prints."""
    done = subprocess.run(
        _command(python, *arguments),
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=_DEMO_S,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_demo_recovers_grows_back_and_ends_with_the_losses_of_the_undisturbed_run(short_demo: Demo) -> None:
    _assert_passed(short_demo.status, short_demo.outcome, _LAYOUTS[_SHORT])
    assert short_demo.left == []


@pytest.mark.matrix
def test_the_demo_changes_the_layout_and_returns_to_it(wheel_python: Path, folder: Path) -> None:
    _assert_passed(*_shoal(wheel_python, folder, "demo", *_RELAYOUT), _LAYOUTS[_RELAYOUT])
    assert [path.name for path in folder.iterdir() if path.name.startswith("shoal-")] == []


def _assert_passed(status: int, outcome: Any, layouts: list[str]) -> None:
    assert status == 0, outcome
    assert outcome["state"] == "SUCCEEDED"
    assert outcome["steps"] >= MIN_STEPS
    assert outcome["world_sizes"] == [4, 3, 4]
    assert [layout for layout in outcome["layouts"] if layout in layouts] == layouts
    assert len(outcome["surviving_pids"]) == 3
    assert [incident["cause"] for incident in outcome["incidents"]] == ["worker_died"]
    assert outcome["max_abs_loss_diff"] <= TOLERANCE


@pytest.fixture(scope="module")
def history(short_demo: Demo) -> History:
    """What Prometheus scraped from the demo."""
    if short_demo.history is None:
        missing("prometheus", "prometheus is not installed")
    assert short_demo.history is not None
    return short_demo.history


@pytest.fixture(scope="module")
def job_id(history: History) -> str:
    """The job that had the incident."""
    [found] = history.labels("shoal_job_incidents_total > 0", "job_id")
    return found


def test_the_first_incident_of_a_cause_is_an_increase_and_names_its_job(history: History, job_id: str) -> None:
    assert max(history.values('increase(shoal_incidents_total{cause="worker_died"}[1m])')) > 0.9
    slowest = history.values(
        'histogram_quantile(0.95, sum by (le) (increase(shoal_recovery_seconds_bucket{phase="recovery"}[1m])))'
    )
    assert slowest and 0 < max(slowest) < 60
    [named] = {exemplar["job_id"] for exemplar in history.exemplars("shoal_recovery_seconds_bucket")}
    assert named == job_id


def test_no_counter_of_a_run_falls(history: History) -> None:
    names = history.labels('{__name__=~"shoal_.+_(total|count|bucket)"}', "__name__")
    assert len(names) > 20
    falling = {name for name in names if max(history.values(f"max(resets({name}[10m]))"), default=0) > 0}
    assert falling == set()


def test_the_final_values_of_an_ended_job_are_scraped(history: History, job_id: str) -> None:
    ended = f'shoal_job_state{{job_id="{job_id}", state="SUCCEEDED"}} == 1'
    assert history.values(f'shoal_job_step{{job_id="{job_id}"}} and on (job_id) ({ended})')


@pytest.mark.matrix
def test_the_doctor_finds_everything_that_jobs_need(wheel_python: Path, folder: Path) -> None:
    status, report = _shoal(wheel_python, folder, "doctor", "--url", "http://127.0.0.1:1")
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert status == 0
    assert verdicts.pop("server") == "warn", "no server listens on port 1"
    assert {"ray", "torch", "gloo", "database", "memory"} <= set(verdicts)
    assert "fail" not in verdicts.values()
    assert report["verdict"] == "warn"
