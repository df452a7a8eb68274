"""A loop of a user's own on a real cluster: a worker is killed, and the others go on in their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kit.processes.server import PATIENCE_S, until
from kit.worlds import plain_loop
from shoal_api.client import Client
from shoal_workers.contract.job import IncidentCause, JobState, StateSource
from shoal_workers.forkserver.orphans import parents

LOOPS = Path(__file__).parents[1] / "kit" / "loops"
STEPS, GATED = 8, 6


def readers_of(pids: Iterable[int]) -> set[int]:
    """The processes that read data for workers."""
    return {pid for pid, parent in parents().items() if parent in pids}


@pytest.mark.first
def test_a_killed_worker_costs_a_loop_no_step_and_no_process(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = client.submit(
        {
            "name": "gated",
            "loop": {"file": "gated.py", "args": [str(gate)]},
            "code": {"working_dir": str(LOOPS)},
            "elasticity": {"min_workers": 2, "max_workers": 2},
            "snapshot": {"budget": 1.0},  # one after each step, also on a busy machine
        }
    )
    until(lambda: client.job(job.id).status.step >= GATED, f"step {GATED}")
    before = {worker.rank: worker.pid for worker in client.workers(job.id)}
    readers = readers_of(before.values())
    assert len(readers) == 4, "each worker has two"
    os.kill(before[1], signal.SIGKILL)
    until(lambda: client.incidents(job.id), "the incident")
    gate.touch()
    status = client.wait(job.id, timeout_s=PATIENCE_S).status
    assert status.state is JobState.SUCCEEDED, status
    assert (status.step, status.attempt, status.steps_lost) == (STEPS, 1, 0)
    assert not readers & parents().keys(), "no process that has read data is left"
    [incident] = client.incidents(job.id)
    assert (incident.cause, incident.closed) == (IncidentCause.WORKER_DIED, True)
    assert incident.state_source is StateSource.MEMORY
    points = {point.step: point.loss for point in client.series(job.id)}
    program = [sys.executable, plain_loop.__file__, str(LOOPS / "digits.py")]
    answer = subprocess.run(program, capture_output=True, text=True, check=True)
    losses = json.loads(answer.stdout.splitlines()[0])
    assert points == pytest.approx({int(step): loss for step, loss in losses.items()}, abs=3e-7)
