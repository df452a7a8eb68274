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
