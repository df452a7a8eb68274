"""What the loss of a node costs, against what the status promised before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kit.processes.server import until
from shoal_api.client import Client
from shoal_workers.contract.job import IncidentCause

SHARDED = {"dp_shard": "auto"}
"""Otherwise every worker has the whole state, and the loss of a node costs nothing."""


@pytest.fixture
def client(arena: Any) -> Iterator[Client]:
    """A client of the arena's server, for which each node is a machine of its own."""
    arena.mend()
    with arena.server.client as client:
        yield client


def _by_node(client: Client, run: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for worker in client.workers(run.id):
        if worker.rank is not None:
            found.setdefault(worker.node_ip, []).append(worker.rank)
    return found


def _node_of_two(client: Client, run: Any) -> str:
    """Four workers on three nodes with room for two each."""
    return next(ip for ip, ranks in _by_node(client, run).items() if len(ranks) == 2)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_with_a_gradient_log_the_loss_of_a_node_with_two_ranks_costs_at_most_one_step(
    client: Client, arena: Any, submit: Any, phase: str
) -> None:
    """The same job and budget, but with the built-in optimizer. The node dies in the middle of step 49, and in the
    update."""
    settings: dict[str, Any] = {
        "to": client,
        "task": "struck:BuiltIn",
        "parallelism": SHARDED,
        "workers": 4,
        "steps": 60,
        "checkpoint": {"every_steps": 1000},
        "snapshot": {"budget": 0.01},
    }
    undisturbed = submit(**settings)
    undisturbed.finish()
    run = submit(**settings, step_s=0.05, holds=[{"phase": phase, "n": 49, "rank": 0}])
    run.wait_at(f"{phase}-49-0")
    victim = _node_of_two(client, run)
    until(lambda: run.now().status.step == 48, "the status shows the newest step")
    before = run.now().status.node_loss
    assert (before.protection, before.at_most) == ("gradient_log", 1), before.words()
    arena.nodes.kill_raylet(victim)
    run.wait_for_event("incident.opened")
    run.release(f"{phase}-49-0")
    run.finish()

    [incident] = client.incidents(run.id)
    assert incident.cause is IncidentCause.NODE_DIED
    assert incident.node_loss is not None and incident.node_loss.protection == "gradient_log"
    assert incident.state_source == "memory"
    assert incident.steps_lost <= 1
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
