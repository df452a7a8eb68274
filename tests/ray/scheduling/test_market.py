"""Jobs share a cluster with each other and with others: nobody waits for workers that another does not need."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kit.processes.server import NUM_CPUS, PATIENCE_S, Server, until
from shoal_api.client import Client
from shoal_workers.contract.job import JobState

TWO = {"cpus": 2.0}
"""Four such workers take the whole cluster."""
_TENANT = Path(__file__).parents[2] / "kit" / "programs" / "foreign_tenant.py"


@contextmanager
def tenant(server: Server, cpus: int) -> Iterator[None]:
    """Another user of the Ray cluster holds CPUs."""
    assert server.note is not None
    process = subprocess.Popen(
        [sys.executable, _TENANT, server.note["address"], str(cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **server.ray_environment},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.stdin.close()
        process.wait(timeout=PATIENCE_S)
        process.stdout.close()


@pytest.mark.matrix
def test_a_job_gets_only_what_others_on_the_cluster_leave_and_grows_when_they_go(
    submit, client: Client, shoal_server: Server
) -> None:
    with tenant(shoal_server, NUM_CPUS - 2):
        until(lambda: client.cluster().nodes[0].cpus_of_others == NUM_CPUS - 2, "the service sees the tenant")
        run = submit(workers=4, waves=[1], steps=72, step_s=0.3)
        large = submit(workers=4, min_workers=4, steps=4)
        until(lambda: run.now().status.step >= 3, "the job trains")
        assert run.now().status.desired_workers == 2
        assert large.now().status.state is JobState.QUEUED
        client.cancel(large.id)
    until(lambda: run.now().status.desired_workers == 4, "the job is granted what the tenant has left")
    run.finish()
    sizes = run.world_sizes()
    assert sizes[0] == 2 and sizes[-1] == 4 and run.now().status.steps_lost == 0
    run.assert_undisturbed_losses()


def test_a_job_that_holds_everything_is_shrunk_for_the_next_one_and_loses_no_step(submit, shoal_server: Server) -> None:
    shoal_server.wait_until_free()  # of the jobs of the test before
    # longer than a busy machine takes to start the workers of the second job
    first = submit(workers=4, worker=TWO, waves=[1], steps=72, step_s=0.5)
    until(lambda: first.now().status.step >= 3, "the first job trains on the whole cluster")
    assert first.now().status.desired_workers == 4
    second = submit(workers=4, worker=TWO, waves=[1], steps=20, step_s=0.1)
    until(lambda: second.now().status.step >= 1, "the second job trains")
    job = second.now()
    assert not first.now().status.state.ended
    print(f"second job: first step seen {time.time() - job.created_at:.2f} s after submit")
    shrunk = first.events("job.granted")[0]
    assert shrunk.data["from"] == 4 and 1 <= shrunk.data["to"] < 4 and second.id in shrunk.data["reason"]
    second.finish()
    first.finish()
    for run in (first, second):
        run.assert_undisturbed_losses()
        assert run.now().status.steps_lost == 0
