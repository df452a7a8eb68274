"""A node that is too busy to answer Ray is not dead, and a host that is cut off takes part again when it answers."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit.processes.hosts import Hosts, why_not
from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client
from shoal_workers.contract.job import IncidentCause

_SILENT_S = 5.0
"""Twice as long as Ray's health check waited before: three probes of 0.5 s, 0.3 s apart."""
_VERDICT_S = 12.0
"""Ray's health check takes at least this long."""


@pytest.fixture
def client(arena: Any) -> Iterator[Client]:
    """A client of the repaired cluster. A fixture, so that a job which a failed test leaves behind is still
    cancelled."""
    arena.mend()
    with arena.server.client as client:
        yield client


@pytest.mark.matrix
def test_a_raylet_that_answers_nothing_for_five_seconds_is_not_dead(client: Client, submit: Any, arena: Any) -> None:
    """A stopped raylet does what one without CPU does: its kernel answers connects, and it answers nothing."""
    run = submit(to=client, workers=3, steps=30, strikes=holds(8, 20))
    run.wait_at("step-8-0")
    before = run.pids()
    alive = {node.node_id for node in client.nodes() if node.alive}
    node_ip = client.workers(run.id)[1].node_ip
    raylet = arena.nodes.raylet_pid(node_ip)
    os.kill(raylet, signal.SIGSTOP)
    try:
        run.release("step-8-0")
        time.sleep(_SILENT_S)  # the fault itself: nothing happens while the raylet is stopped
    finally:
        os.kill(raylet, signal.SIGCONT)
    run.wait_at("step-20-0")
    assert alive <= {node.node_id for node in client.nodes() if node.alive}
    assert run.pids() == before
    run.release("step-20-0")
    job = run.finish()
    assert job.status.generation == 1 and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()


@pytest.fixture
def hosts(shoal_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Client]]:
    """Three hosts of one CPU, and a control plane on the machine of Ray's head."""
    if (reason := why_not()) is not None:
        pytest.skip(f"hosts cannot be made here: {reason}")
    folder = tmp_path_factory.mktemp("hosts")
    cluster = Hosts(folder / "hosts", num_hosts=3, cpus_per_host=1)
    try:
        cluster.start()
        environment = dict(cluster.environment)
        server = type(shoal_server)(shoal_server.python, folder / "state", cluster.serve_options, environment)
        with server.running() as client:
            yield cluster, client
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.matrix
def test_a_host_that_is_cut_off_is_left_out_and_takes_part_again(hosts: tuple[Hosts, Client], submit: Any) -> None:
    cluster, client = hosts
    run = submit(to=client, workers=3, steps=2000, step_s=0.05, snapshot={"budget": 1.0}, strikes=holds(8))
    run.wait_at("step-8-0")
    before = sorted(run.pids().values())
    supervisors = set(cluster.pids_of("SupervisorActor").values())
    victim = next(w for w in client.workers(run.id) if w.rank and w.node_ip not in supervisors)
    run.release("step-8-0")
    run.wait_for_step(12)
    cut_at = cluster.cut(victim.node_ip)
    silent = run.wait_for_event("node.silent")
    assert silent.at - cut_at < _VERDICT_S, "the suspicion is Shoal's own"
    print(f"noticed after {silent.at - cut_at:.2f} s")
    run.wait_for_event("incident.closed")
    cluster.heal(victim.node_ip)
    run.wait_for_event("node.answers")
    run.wait_for_event("generation.formed", 3)

    assert sorted(run.pids().values()) == before, "no process was ended or started"
    [incident] = client.incidents(run.id)
    assert incident.cause is IncidentCause.NODE_UNREACHABLE and incident.ranks == (victim.rank,)
    status = client.job(run.id).status
    assert status.steps_lost <= 1 and status.workers == 3
    assert run.events("worker.lost") == [] and all(node.alive for node in client.nodes())
    client.cancel(run.id)
