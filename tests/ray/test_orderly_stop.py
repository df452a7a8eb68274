"""`shoal serve` ends with its cluster: saved and continued from the very step, hurried, or killed at a known cost."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import Server, until
from kit.worlds.tiny_jobs import Run, holds, submit_tiny
from shoal_service.core.goodput import Category
from shoal_workers.contract.job import IncidentCause, StateSource

_HELD = 20
"""Step that is not complete when the server has to stop."""
_AFTER = 25
"""Step under the next server that is held, to look at the job before its end."""


@pytest.fixture
def server(wheel_python: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """One of this test, with a cluster of its own. The parameter adds to its environment."""
    environment = {"RAY_worker_niceness": "0", **getattr(request, "param", {})}
    server = Server(wheel_python, tmp_path / "server", ["--num-cpus=2"], environment)
    temp_dirs = []
    try:
        server.start().wait_for_cluster()
        assert server.note is not None
        temp_dirs.append(server.note["temp_dir"])
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
        if server.note is not None:
            temp_dirs.append(server.note["temp_dir"])
        server.sweep()
        for temp_dir in temp_dirs:
            shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture
def held(server: Server, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`held(checkpoint_every)`: a job that trains, with a step under way that does not end until it is released."""

    def submit(checkpoint_every: int) -> Run:
        run = submit_tiny(
            client,
            tmp_path,
            dict,
            steps=_HELD + 10,
            strikes=holds(_HELD, _AFTER),
            checkpoint={"every_steps": checkpoint_every},
        )
        run.wait_at(f"step-{_HELD}-0")
        run.wait_for_step(_HELD - 1)
        return run

    with server.client as client:
        yield submit


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.matrix)],
)
def test_a_stop_saves_the_step_under_way_and_the_next_server_continues_after_it(
    server: Server, held: Callable[..., Run], number: signal.Signals
) -> None:
    run = held(checkpoint_every=1000)
    server.send(number)
    until(lambda: "Saving 1 job before the Ray cluster stops" in server.output(), "the server says that it saves")
    assert run.now().status.step == _HELD - 1, "requests are answered meanwhile"
    run.release(f"step-{_HELD}-0")
    assert server.wait() == 0
    assert f"{run.id}: saved at step {_HELD}" in server.output(), server.output()
    assert server.processes() == {} and _in_shared_memory(run) == []

    server.start().wait_for_cluster()
    run.release(f"step-{_AFTER}-0")
    job = run.finish()
    assert job.status.attempt == 2 and job.status.steps_lost == 0
    assert run.client.incidents(run.id) == ()
    formed = run.events("generation.formed")
    assert [event.data["start_step"] for event in formed] == [0, _HELD]
    assert list(run.losses()) == list(range(1, _HELD + 11))
    assert job.status.goodput is not None
    assert job.status.goodput.seconds[Category.RECOMPUTED] == 0
    assert _in_shared_memory(run) == []


@pytest.mark.matrix
def test_a_second_signal_stops_at_once_and_what_was_lost_is_an_incident(
    server: Server, held: Callable[..., Run]
) -> None:
    run = held(checkpoint_every=8)
    server.send(signal.SIGINT)
    until(lambda: "Ctrl-C again" in server.output(), "the server says how to hurry")
    server.send(signal.SIGINT)
    assert server.wait() == 0, "without the step that is under way"
    assert f"{run.id}: not saved" in server.output()
    assert server.processes() == {} and _in_shared_memory(run) == []

    run.release(f"step-{_HELD}-0")
    server.start().wait_for_cluster()
    _assert_lost_from(run, checkpoint=16)


def _assert_lost_from(run: Run, *, checkpoint: int) -> None:
    """The job goes on from this checkpoint, and says what that costs."""
    run.wait_at(f"step-{_AFTER}-0")
    run.wait_for_step(_AFTER - 1)
    goodput: Any = run.now().status.goodput
    assert goodput.recovering[IncidentCause.CLUSTER_LOST] > 0
    assert goodput.seconds[Category.RECOMPUTED] > 0
    assert goodput.seconds[Category.IDLE] == 0
    run.release(f"step-{_AFTER}-0")
    job = run.finish()
    [incident] = run.client.incidents(run.id)
    assert incident.cause is IncidentCause.CLUSTER_LOST and incident.closed
    assert (incident.attempt, incident.steps_lost) == (2, _HELD - 1 - checkpoint)
    assert incident.state_source is StateSource.CHECKPOINT
    assert job.status.steps_lost == _HELD - 1 - checkpoint and job.status.incidents == 1
    assert _in_shared_memory(run) == []


def _in_shared_memory(run: Run) -> list[Path]:
    """Files of this job's attempts."""
    return [path for base in Path("/dev/shm").glob("shoal-*") for path in base.glob(f"*{run.id}*")]
