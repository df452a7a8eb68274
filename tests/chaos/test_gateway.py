"""The gateway of the cluster stands still while jobs train: nothing of it is seen in the losses. test_service_death.py
kills it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import Server, until
from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client


@pytest.mark.matrix
def test_a_gateway_that_hangs_is_killed_and_another_one_follows_while_jobs_train(
    submit: Any, shoal_server: Server, client: Client
) -> None:
    run = submit(steps=30, strikes=holds(5, 25))
    run.wait_at("step-5-0")
    pids = run.pids()
    first = shoal_server.gateway()
    os.kill(first, signal.SIGSTOP)
    run.release("step-5-0")
    run.wait_at("step-25-0")
    until(lambda: not client.cluster().connected, "its silence is noticed")
    until(lambda: client.cluster().connected, "another one speaks for the cluster")
    assert shoal_server.gateway() != first and not Path(f"/proc/{first}").exists()
    assert "gateway.hangs" in shoal_server.output() and run.pids() == pids
    run.release("step-25-0")
    job = run.finish()

    assert job.status.attempt == 1 and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()
