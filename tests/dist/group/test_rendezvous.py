"""Exchanges of all ranks at one store, over real sockets: each rank is a thread with a connection of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.generation_ends import Fenced, FormFailed
from shoal_workers.engine.group.fence import Fence
from shoal_workers.engine.group.rendezvous import Rendezvous, StoreConnections
from shoal_workers.engine.group.store.server import StoreServer

KEY = "the attempt's key"
WORLD = 4


class Ranks:
    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(WORLD)
        self.connections = [StoreConnections(KEY) for _ in range(WORLD)]
        self.fences = [Fence() for _ in range(WORLD)]
        self.all: list[Rendezvous] = []

    def meet(self, generation: int = 1, **values: Any) -> list[Rendezvous]:
        """The rendezvous of each rank, connected."""
        self.all = [
            Rendezvous(self._assignment(rank, generation, values), self.connections[rank], fence.of(generation).check)
            for rank, fence in enumerate(self.fences)
        ]
        for one in self.all:
            one.connect()
        return self.all

    def call(self, act: Callable[[Rendezvous], Any], ranks: range = range(WORLD)) -> list[Future[Any]]:
        """On a thread of each rank."""
        return [self._threads.submit(act, self.all[rank]) for rank in ranks]

    def close(self) -> None:
        for one in self.all:
            one.close()
        for connections in self.connections:
            connections.close()
        self._threads.shutdown()

    def _assignment(self, rank: int, generation: int, values: dict[str, Any]) -> Assignment:
        return Assignment(
            job_id="job",
            attempt=1,
            generation=generation,
            rank=rank,
            layout=fully_sharded(WORLD),
            store_host=self._server.host,
            store_port=self._server.port,
            restore_from=None,
            **values,
        )


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    server = StoreServer("127.0.0.1", KEY)
    ranks = Ranks(server)
    yield ranks
    ranks.close()
    server.close()


def test_every_rank_gets_every_value_by_rank(ranks: Ranks) -> None:
    ranks.meet()
    found = ranks.call(lambda one: one.gather("x", f"é\n{one._assignment.rank}"))
    assert [one.result(60) for one in found] == [[f"é\n{rank}" for rank in range(WORLD)]] * WORLD


def test_values_larger_than_a_socket_buffer_arrive_whole(ranks: Ranks) -> None:
    ranks.meet()
    found = ranks.call(lambda one: one.gather("x", str(one._assignment.rank) * 1_000_000))
    for one in found:
        assert [(value[0], len(value)) for value in one.result(60)] == [(str(r), 1_000_000) for r in range(WORLD)]


def test_nobody_passes_before_the_last_one_arrives(ranks: Ranks) -> None:
    ranks.meet()
    early = ranks.call(lambda one: one.arrive("x"), range(WORLD - 1))
    assert ranks.all[-1].store.absent("x", WORLD)[-1] == WORLD - 1
    assert not any(one.done() for one in early)
    (last,) = ranks.call(lambda one: one.arrive("x"), range(WORLD - 1, WORLD))
    assert [one.result(60) for one in [*early, last]] == [None] * WORLD


def test_rank_0_decides_from_all_values_and_the_others_get_the_decision_only(ranks: Ranks) -> None:
    seen: list[list[str]] = []

    def decide(values: list[str]) -> str:
        seen.append(values)
        return json.dumps(sum(map(int, values)))

    ranks.meet()
    found = ranks.call(lambda one: one.decide("x", str(10**one._assignment.rank), decide))
    assert [one.result(60) for one in found] == ["1111"] * WORLD
    assert seen == [["1", "10", "100", "1000"]]


@pytest.mark.parametrize("way", ["gather", "arrive", "decide"])
def test_missing_ranks_are_named_after_the_deadline(ranks: Ranks, way: str) -> None:
    ranks.meet(store_timeout_s=0.5)
    acts: dict[str, Callable[[Rendezvous], Any]] = {
        "gather": lambda one: one.gather("x", ""),
        "arrive": lambda one: one.arrive("x"),
        "decide": lambda one: one.decide("x", "", "".join),
    }
    for one in ranks.call(acts[way], range(1, 3)):
        with pytest.raises(FormFailed, match=r"^2 of 4 ranks did not arrive \(x\) within 0.5 s: rank 0, 3\.$"):
            one.result(60)


def test_an_exchange_may_have_a_deadline_of_its_own(ranks: Ranks) -> None:
    ranks.meet(store_timeout_s=0.05)
    early = ranks.call(lambda one: one.arrive("x", timeout_s=60.0), range(WORLD - 1))
    with pytest.raises(FormFailed, match=r"\(y\) within 0.05 s"):
        ranks.all[-1].arrive("y")
    ranks.all[-1].arrive("x", timeout_s=60.0)
    assert [one.result(60) for one in early] == [None] * (WORLD - 1)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_fence_ends_the_wait_and_the_connection_serves_the_next_generation(ranks: Ranks, rank: int) -> None:
    ranks.meet(store_timeout_s=600.0)
    waiting = ranks.call(lambda one: one.decide("x", "", "".join), range(WORLD - 1))
    while len(ranks.all[-1].store.absent("x", WORLD)) > 1:
        pass  # until the others wait
    before = [one._connection for one in ranks.all]
    for fence, one in zip(ranks.fences, ranks.all, strict=True):
        fence.raise_to(1)
        one.wake()
    assert [type(one.exception(60)) for one in waiting] == [Fenced] * (WORLD - 1)
    for one in ranks.all:
        one.close()
    ranks.meet(generation=2)
    assert ranks.all[rank]._connection is before[rank]
    assert [one.result(60) for one in ranks.call(lambda one: one.gather("x", "new"))] == [["new"] * WORLD] * WORLD


def test_a_decision_that_fails_is_raised_on_rank_0_and_the_others_are_fenced_out_of_their_wait(ranks: Ranks) -> None:
    def fail(values: list[str]) -> str:
        raise ZeroDivisionError

    ranks.meet(store_timeout_s=600.0)
    found = ranks.call(lambda one: one.decide("x", "", fail))
    assert isinstance(found[0].exception(60), ZeroDivisionError)
    for fence, one in zip(ranks.fences, ranks.all, strict=True):
        fence.raise_to(1)
        one.wake()
    assert [type(one.exception(60)) for one in found[1:]] == [Fenced] * (WORLD - 1)
