"""No tp group of 16 workers on four nodes of four crosses nodes, and the losses stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kit.processes.server import until
from kit.worlds.tiny_jobs import STACKED, holds
from shoal_api.client import Client

WORKERS, PER_NODE, STEPS = 16, 4, 16
PLACED: dict[str, Any] = {**STACKED, "batch": {"global_size": 8, "micro_size": 1}, "steps": STEPS}


@pytest.fixture
def client(wide_arena: Any) -> Iterator[Client]:
    wide_arena.mend()
    with wide_arena.server.client as client:
        yield client


@pytest.fixture(scope="module")
def losses_of_one_worker(wide_arena: Any, submit_for_module: Any) -> dict[int, float]:
    with wide_arena.server.client as client:
        run = submit_for_module(to=client, workers=1, **PLACED)
        run.finish()
        losses: dict[int, float] = run.losses()
    return losses


def start(submit: Any, client: Client, parallelism: dict[str, int], strikes: list[dict[str, Any]]) -> Any:
    """Workers without a place in the layout stay idle, so that the degrees remain."""
    return submit(
        to=client,
        workers=WORKERS,
        min_workers=4,
        waves=[WORKERS],
        parallelism={**parallelism, "otherwise": "idle"},
        strikes=strikes,
        **PLACED,
    )


def nodes_by_rank(client: Client, run: Any, world_size: int) -> list[str]:
    """Once the service shows all workers of the group."""

    def ranked() -> list[Any]:
        found = sorted((w for w in client.workers(run.id) if w.rank is not None), key=lambda w: w.rank)
        return found if [w.rank for w in found] == list(range(world_size)) else []

    return [worker.node_ip for worker in until(ranked, f"{world_size} workers of {run.id} have ranks")]


def assert_inside_nodes(nodes: list[str], tp: int) -> None:
    groups = [nodes[first : first + tp] for first in range(0, len(nodes), tp)]
    assert all(len(set(group)) == 1 for group in groups), groups


def assert_same(run: Any, reference: dict[int, float]) -> None:
    losses = run.losses()
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(reference, rel=1e-5, abs=1e-6)
    assert [event.data["remark"] for event in run.events("generation.forming")] == [""] * 3


def layouts(run: Any) -> list[str]:
    return [event.data["layout"] for event in run.events("generation.formed")]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("parallelism", "before", "meanwhile"),
    [({"tp": 4}, "fsdp4 x tp4", "fsdp3 x tp4"), ({"pp": 2, "tp": 2}, "pp2 x fsdp4 x tp2", "pp2 x fsdp3 x tp2")],
    ids=["tp4", "pp2 x tp2"],
)
def test_a_worker_is_lost_and_replaced(
    client: Client,
    submit: Any,
    losses_of_one_worker: dict[int, float],
    parallelism: dict[str, int],
    before: str,
    meanwhile: str,
) -> None:
    kill = {"at": "step", "rank": 5, "n": 7, "do": "kill"}
    run = start(submit, client, parallelism, [*holds(5, 8, 14), kill])
    run.wait_at("step-5-0")
    first = nodes_by_rank(client, run, WORKERS)
    assert_inside_nodes(first, parallelism["tp"])
    pids = run.pids()
    run.release("step-5-0")
    run.wait_at("step-8-0")
    assert_inside_nodes(nodes_by_rank(client, run, 12), parallelism["tp"])
    assert set(run.pids().values()) < set(pids.values()) - {pids[5]}, "survivors only"
    run.wait_for_event("generation.switching")
    run.release("step-8-0")
    run.wait_at("step-14-0")
    assert_inside_nodes(nodes_by_rank(client, run, WORKERS), parallelism["tp"])
    run.release("step-14-0")
    run.finish()
    assert layouts(run) == [before, meanwhile, before]
    [incident] = client.incidents(run.id)
    assert incident.ranks == (5,) and incident.state_source == "memory"
    assert_same(run, losses_of_one_worker)


@pytest.mark.matrix
def test_workers_fill_nodes_so_that_tp_groups_have_room(client: Client, submit: Any) -> None:
    """Ray's default policy takes another node once half of one is in use: it put one worker of four on each node."""
    run = submit(
        to=client,
        workers=4,
        min_workers=4,
        waves=[4],
        worker={"cpus": 2},
        parallelism={"tp": 2},
        strikes=holds(2),
        **PLACED,
    )
    run.wait_at("step-2-0")
    nodes = nodes_by_rank(client, run, 4)
    assert_inside_nodes(nodes, 2)
    assert sorted(Counter(nodes).values()) == [2, 2]
    run.release("step-2-0")
    run.finish()
