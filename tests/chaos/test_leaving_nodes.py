"""Nodes that may not be used for some time: cordons and preemption notices. No step is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.processes.server import until
from kit.worlds.tiny_jobs import Run, holds
from shoal_api.client import Client
from shoal_service.core.nodes import DrainSource

_BLOCKED_IP = "127.0.0.4"


@pytest.fixture
def client(arena) -> Iterator[Client]:
    """A client of a cluster of three nodes and a head without CPUs."""
    arena.mend()
    with arena.server.client as client:
        yield client


def _nodes_of(client: Client, run: Run) -> set[str]:
    """Nodes of the workers that train."""
    return {worker.node_id for worker in client.workers(run.id) if worker.rank is not None}


def _leave_during_step_5(client: Client, run: Run, node_id: str) -> None:
    """The workers of the node are replaced elsewhere; then the job ends undisturbed."""
    run.wait_for_event("worker.started", 4)
    run.wait_for_event("generation.switching")
    run.release("step-5-0")
    run.wait_at("step-16-0")
    assert node_id not in _nodes_of(client, run)
    run.release("step-16-0")
    job = run.finish()
    assert job.status.steps_lost == 0 and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_job_grows_beside_a_cordoned_node_keeps_its_workers_there_and_loses_no_step(client: Client, submit) -> None:
    run = submit(to=client, workers=3, steps=72, step_s=0.2, strikes=holds(5, 16))
    run.wait_at("step-5-0")
    cordoned = max(client.workers(run.id), key=lambda worker: worker.rank)
    before = run.pids()
    on_node = client.node(cordoned.node_id).num_workers
    assert client.cordon(cordoned.node_id, reason="a loose fan").cordon is not None
    try:
        client.scale(run.id, max_workers=5)
        run.wait_for_event("worker.started", 5)
        run.wait_for_event("generation.switching")
        run.release("step-5-0")
        run.wait_at("step-16-0")
        assert run.world_sizes() == [3, 5]
        assert {rank: pid for rank, pid in run.pids().items() if rank in before} == before, "its workers stay"
        assert client.node(cordoned.node_id).num_workers == on_node, "and get no company"
        run.release("step-16-0")
        job = run.finish()
    finally:
        assert client.undo_cordon(cordoned.node_id).cordon is None
    assert job.status.steps_lost == 0 and client.incidents(run.id) == ()
    assert [event.data["reason"] for event in run.events("node.cordoned")] == ["a loose fan"]
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_job_leaves_a_machine_whose_cloud_announces_its_end(client: Client, submit) -> None:
    """By the machine's address, which is what its hook knows."""
    run = submit(to=client, workers=3, steps=24, strikes=holds(5, 16))
    run.wait_at("step-5-0")
    leaver = max(client.workers(run.id), key=lambda worker: worker.rank)
    [noticed] = client.announce_preemption(leaver.node_ip, deadline_s=600.0)
    try:
        assert noticed.node_id == leaver.node_id and noticed.drain is not None
        assert noticed.drain.source is DrainSource.NOTICE
        _leave_during_step_5(client, run, leaver.node_id)
    finally:
        assert client.undo_drain(leaver.node_id).drain is None


@pytest.mark.matrix
def test_a_job_leaves_a_node_whose_ray_start_receives_sigterm(client: Client, arena, submit) -> None:
    """As on spot instances and in pods. Ray drains the node, and ends it once it is idle, within 30 s by default."""
    arena.nodes.remove(_BLOCKED_IP)
    arena.nodes.add(_BLOCKED_IP, num_cpus=2, block=True)
    arena.wait_until_whole()
    batch = {"global_size": 10, "micro_size": 1}  # a micro-batch for each worker
    undisturbed = submit(to=client, workers=2, steps=24, batch=batch)
    undisturbed.finish()
    run = submit(to=client, workers=6, min_workers=1, steps=24, strikes=holds(5, 16), batch=batch)
    run.wait_at("step-5-0")
    [leaver] = {worker.node_id for worker in client.workers(run.id) if worker.node_ip == _BLOCKED_IP}
    arena.nodes.terminate(_BLOCKED_IP)
    drain = until(lambda: client.node(leaver).drain, "the drain is seen")
    assert drain.source is DrainSource.RAY and drain.deadline is not None
    run.wait_for_event("generation.switching")
    run.release("step-5-0")
    run.wait_at("step-16-0")
    assert run.world_sizes() == [6, 4] and leaver not in _nodes_of(client, run)
    until(lambda: not arena.nodes.is_alive(_BLOCKED_IP), "the node has ended by itself")
    run.release("step-16-0")
    job = run.finish()
    assert job.status.steps_lost == 0 and client.incidents(run.id) == ()
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-5, abs=1e-6)
