"""A node without memory: Ray's memory monitor kills the supervisor again and again, and the job says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.server import Server
from kit.worlds.tiny_jobs import submit_tiny
from shoal_workers.contract.job import JobState

_ALWAYS_FULL = {"RAY_memory_usage_threshold": "0.001"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "refresh_ms",
    [
        pytest.param("250", id="before it has recorded its start"),  # Ray's default; the control plane ends the attempt
        pytest.param("2500", id="after that"),
    ],
)
def test_a_supervisor_that_is_killed_for_lack_of_memory_names_the_cause(
    wheel_python: Path, tmp_path: Path, refresh_ms: str
) -> None:
    environment = {**_ALWAYS_FULL, "RAY_memory_monitor_refresh_ms": refresh_ms}
    server = Server(wheel_python, tmp_path / "server", ["--num-cpus=1"], environment)
    (tmp_path / "gate").mkdir()
    no_losses: Callable[[], dict[int, float]] = dict
    with server.running() as client:
        run = submit_tiny(client, tmp_path / "gate", no_losses, workers=1, steps=1000, step_s=1.0)
        status = run.wait_for(JobState.FAILED).status
        assert "had no memory left" in status.message and "worker.memory_gib" in status.message, status.message
