"""What decides dies by SIGKILL, and training never notices: the gateway, the control plane, one of two of them, the
supervisor."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("token", ["lost", "kept"])
def test_training_continues_while_the_gateway_and_then_the_control_plane_is_dead(
    submit, shoal_server, client: Client, token: str
) -> None:
    """`lost`: the database that it finds again has no token of the running attempt, which gets another one."""
    run = submit(steps=50, strikes=holds(5, 25, 45))
    run.wait_at("step-5-0")
    pids = run.pids()
    gateway = shoal_server.gateway()
    os.kill(gateway, signal.SIGKILL)
    run.release("step-5-0")
    run.wait_at("step-25-0", with_service=False)
    run.wait_for_step(24)
    assert shoal_server.gateway() != gateway and run.pids() == pids
    try:
        shoal_server.kill()
        killed_at = time.time()
        run.release("step-25-0")
        run.wait_at("step-45-0", with_service=False)
        assert set(pids.values()) <= set(shoal_server.processes())
        if token == "lost":
            with closing(sqlite3.connect(shoal_server.state_dir / "shoal.db")) as database, database:
                assert database.execute("DELETE FROM attempt_tokens").rowcount >= 1
        restarted_at = time.time()
    finally:
        shoal_server.start().wait_for_cluster()
    if token == "lost":
        rekeyed = run.wait_for_event("supervisor.rekeyed")
        assert rekeyed.data == {"message": "the token of the attempt is not in the database"}
    run.wait_for_step(44)
    assert run.pids() == pids
    run.release("step-45-0")
    job = run.finish()

    assert job.status.attempt == 1 and job.status.steps_lost == 0 and run.world_sizes() == [2]
    assert client.incidents(run.id) == ()
    steps = [point.step for point in client.series(run.id) if killed_at < point.at < restarted_at]
    assert steps == list(range(25, 45)), "completed while no client was connected"
    run.assert_undisturbed_losses()


@pytest.fixture
def two_services(join_cluster: Callable[..., Any], tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Two control planes on one database, joined to the session's cluster."""
    shared = {"SHOAL_LEASE_TTL_S": "3", "SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")}
    services = [
        join_cluster(tmp_path / name, [f"--database-url=sqlite:///{tmp_path}/shared.db"], shared) for name in "ab"
    ]
    for service in services:
        service.start()
    for service in services:
        service.wait_for_cluster()
    yield services[0], services[1]


@pytest.mark.matrix
def test_of_two_control_planes_one_owns_the_jobs_and_the_other_takes_over(submit, two_services) -> None:
    one, other = two_services
    with one.client as client:
        owner = client.cluster().owner
    assert owner
    if f"-{one.process.pid}-" not in owner:
        one, other = other, one
    with one.client as owning, other.client as other_client:
        assert owning.cluster().owner == other_client.cluster().owner
        epoch = owning.cluster().epoch

        run = submit(to=other_client, strikes=holds(5))
        run.wait_at("step-5-0")
        run.wait_for_step(4)
        assert owning.job(run.id).status.step == 4
        assert owning.workers(run.id) == other_client.workers(run.id)
        pids = run.pids()

        one.kill()
        run.release("step-5-0")
        job = run.finish()
        assert other_client.cluster().epoch == epoch + 1
        assert f"-{other.process.pid}-" in other_client.cluster().owner
        assert job.status.attempt == 1 and run.world_sizes() == [2] and pids
        run.assert_undisturbed_losses()
