"""Which workers form the next group, and their ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal_service.core.attempt.placement import next_workers
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import AvoidedNode, Worker, WorkerPool
from shoal_service.core.persistent import Table
from shoal_workers.contract.messages import WorkerInfo

NewWorld = Callable[..., Any]
NOW = 1000.0


def state_of(
    new_world: NewWorld, *, alive: str, ranks: tuple[int, ...], granted: int, avoided: tuple[AvoidedNode, ...] = ()
) -> Attempt:
    state: Attempt = new_world().state
    return replace(
        state,
        pool=WorkerPool(workers=Table(worker(int(index)) for index in sorted(alive))),
        group=replace(state.group, workers=ranks),
        target=replace(state.target, granted=granted, avoided=avoided),
    )


def worker(index: int) -> Worker:
    info = WorkerInfo(worker_id=f"s{index}", node_id=f"n{index}", node_ip="", pid=1, store_port=1, device="cpu")
    return Worker(index=index, worker_id=f"s{index}", info=info)


def next_ranks(state: Attempt) -> str:
    return "".join(str(p.index) for p in next_workers(state, NOW))


@pytest.mark.parametrize(
    ("alive", "granted", "expected"),
    [
        ("0123", 4, "0123"),
        ("0234", 4, "0423"),  # a standby replaces the dead rank
        ("023", 4, "023"),  # without one the others close up
        ("3456", 4, "4563"),
        ("0123", 2, "01"),
        ("012345", 6, "012345"),  # newcomers come last
        ("02345", 6, "04235"),
        ("134", 4, "413"),  # of two gaps the first is filled, the other closed
        ("", 4, ""),
    ],
)
def test_survivors_keep_their_ranks(new_world: NewWorld, alive: str, granted: int, expected: str) -> None:
    assert next_ranks(state_of(new_world, alive=alive, ranks=(0, 1, 2, 3), granted=granted)) == expected


def test_a_worker_that_does_not_answer_is_left_out(new_world: NewWorld) -> None:
    state = state_of(new_world, alive="01", ranks=(0, 1), granted=2)
    silent = replace(state.pool.workers[0], unreachable_since=NOW)
    assert next_ranks(replace(state, pool=state.pool.with_worker(silent))) == "1"


def test_a_straggler_is_used_only_if_no_other_worker_fills_the_group(new_world: NewWorld) -> None:
    for alive, expected in (("012", "012"), ("0123", "031")):
        state = state_of(new_world, alive=alive, ranks=(0, 2, 1), granted=3)
        slow = replace(state.pool.worker(2), slow_until=NOW + 1)
        got = next_ranks(replace(state, pool=state.pool.with_worker(slow)))
        assert got == (expected if alive == "0123" else "021")


@pytest.mark.parametrize(
    ("minimum", "deadline", "expected"),
    [
        (1, None, "0"),
        (2, None, "01"),  # only as many of those that have to go as are needed
        (2, NOW + 60.0, "01"),
        (2, NOW + 1.0, "0"),  # the time has come
    ],
)
def test_a_node_that_is_left_is_used_only_for_min_workers(
    new_world: NewWorld, minimum: int, deadline: float | None, expected: str
) -> None:
    avoided = tuple(AvoidedNode(node_id=node, reason="drain", deadline=deadline) for node in ("n1", "n2"))
    state = state_of(new_world, alive="012", ranks=(0, 1, 2), granted=3, avoided=avoided)
    elasticity = state.target.spec.elasticity.model_copy(update={"min_workers": minimum})
    spec = state.target.spec.model_copy(update={"elasticity": elasticity})
    state = replace(state, target=replace(state.target, spec=spec))
    assert next_ranks(state) == expected


def test_ranks_of_a_node_are_numbered_on_it_and_the_nodes_by_their_first_rank(new_world: NewWorld) -> None:
    world = new_world(workers=5, nodes=2).open(then=1)
    runs = [worker.run for worker in world.group()]
    nodes = [worker.node_id for worker in world.group()]
    assert sorted(nodes.count(node) for node in set(nodes)) == [2, 3]
    for rank, run in enumerate(runs):
        assert run.local_rank == nodes[:rank].count(nodes[rank])
        assert run.node_rank == list(dict.fromkeys(nodes)).index(nodes[rank])
