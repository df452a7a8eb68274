"""A script on a real cluster: its workers and processes are killed, it is paused, and it goes on from its own
checkpoint."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.server import PATIENCE_S, until
from kit.worlds.gated_scripts import GatedScript
from shoal_api.client import Client
from shoal_workers.contract.job import IncidentCause, JobState
from shoal_workers.contract.spec import ContinueFrom

STEPS, SAVED, GATED = 12, 4, 6
"""gated_ddp.py saves every `SAVED` steps, and stands still after step `GATED` until its gate opens."""


class Run(GatedScript):
    """A job with gated_ddp.py on two workers."""

    def __init__(self, client: Client, gate: Path) -> None:
        script = {"file": "gated_ddp.py", "args": [str(STEPS), str(gate)]}
        super().__init__(client, script, gate=gate, gated=GATED, min_workers=2)

    def starts(self, rank: int) -> list[tuple[int, int]]:
        """Step and pid of each process of the script on this rank, oldest first."""
        found = re.compile(rf"rank {rank} of 2 goes on from step (\d+), pid (\d+)")
        return [(int(match[1]), int(match[2])) for line in self.lines("") if (match := found.search(line))]


@pytest.fixture
def run(client: Client, tmp_path: Path) -> Iterator[Run]:
    with Run(client, tmp_path / "gate") as one:
        yield one


@pytest.mark.first
def test_a_script_goes_on_from_its_own_checkpoint(client: Client, run: Run) -> None:
    run.reach_the_gate()
    os.kill(run.pid_of_worker(1), signal.SIGKILL)
    until(lambda: client.incidents(run.id), "the incident")
    run.open()
    status = run.ends(JobState.SUCCEEDED).status

    assert status.message.startswith(f"gated_ddp.py has ended with status 0 on every rank after {STEPS} steps")
    assert (status.step, status.total_steps) == (STEPS, STEPS)
    assert status.loss is not None and (status.lr, status.grad_norm, status.tokens) == (None, None, None)
    assert [step for step, _ in run.starts(rank=0)] == [0, SAVED]
    [incident] = client.incidents(run.id)
    assert (incident.cause, incident.closed) == (IncidentCause.WORKER_DIED, True)
    assert incident.steps_lost == GATED - SAVED
    assert (incident.from_workers, incident.to_workers, incident.state_source) == (2, 2, None)
    assert [point.step for point in client.series(run.id)] == [*range(1, STEPS + 1)]


def test_a_killed_script_goes_on_in_its_worker_and_a_paused_one_in_the_next_attempt(client: Client, run: Run) -> None:
    run.reach_the_gate()
    [(_, pid)] = until(lambda: run.starts(rank=1), "the output of rank 1")
    os.kill(pid, signal.SIGKILL)
    until(lambda: client.incidents(run.id) and client.incidents(run.id)[0].closed, "the incident, and its end")
    run.reach_the_gate()
    [incident] = client.incidents(run.id)
    assert (incident.cause, incident.steps_lost) == (IncidentCause.SCRIPT_DIED, GATED - SAVED)
    client.pause(run.id)
    until(lambda: run.now().status.state is JobState.PAUSED, "the pause")
    assert run.now().status.step == GATED, "what it has reported stays"
    run.open()
    client.resume(run.id)
    status = run.ends(JobState.SUCCEEDED).status
    assert (status.step, status.attempt, status.incidents) == (STEPS, 2, 1)
    assert [step for step, _ in run.starts(rank=0)] == [0, SAVED, SAVED]


def test_a_script_goes_on_from_the_files_of_another_job_and_both_directories_go_with_their_jobs(
    client: Client, run: Run
) -> None:
    run.open()
    spec = run.ends(JobState.SUCCEEDED).spec
    script = spec.script
    assert script is not None
    longer = script.model_copy(update={"args": (str(STEPS + 2), str(run.gate))})
    update = {"script": longer, "continue_from": ContinueFrom(job=run.id), "name": "longer"}
    second = client.submit(spec.model_copy(update=update))
    ended = client.wait(second.id, timeout_s=PATIENCE_S)
    assert (ended.status.state, ended.status.step) == (JobState.SUCCEEDED, STEPS + 2), ended.status
    starts = [line.text for line in client.logs(second.id) if "goes on from step" in line.text]
    assert starts and all(f"goes on from step {STEPS}," in text for text in starts)

    for job_id in (run.id, second.id):
        deleted = client.delete_job(job_id)
        assert deleted.with_files and deleted.finished_at is not None and not Path(deleted.root).exists()
