"""ActorTable: an actor is created, called and killed, also one whose end is ordered before it is there."""

import asyncio
import threading
from typing import Any

import pytest

import ray
from shoal_service.supervisor.workers.ray_fleet import ActorTable
from shoal_workers.contract.messages import Refused


class Table:
    """A table whose actors are texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[str] = []
        self.asked: list[str] = []
        self.checks: list[int] = []
        self.num_replaced = 0
        monkeypatch.setattr(ray, "kill", lambda actor, *, no_restart: self.killed.append(actor))
        self.actors = ActorTable[int](self._replace, lambda: self.checks.append(len(self.killed)))

    def _replace(self) -> None:
        self.num_replaced += 1

    async def kill(self, key: int) -> bool:
        return await self.actors.kill(key, self.asked.append)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


async def test_an_actor_is_asked_to_end_and_killed_once(table: Table) -> None:
    handle: Any = "worker"
    assert await table.actors.create(3, lambda: handle) == "worker"
    assert await table.kill(3) and not await table.kill(3)
    assert (table.asked, table.killed, table.checks) == (["worker"], ["worker"], [0])


async def test_an_actor_that_cannot_be_created_is_forgotten(table: Table) -> None:
    def fail() -> Any:
        raise ray.exceptions.RayError("no such node")

    with pytest.raises(ray.exceptions.RayError, match="no such node"):
        await table.actors.create(3, fail)
    assert not await table.kill(3)


async def test_an_actor_that_is_killed_while_it_is_created_ends_once_it_is_there(table: Table) -> None:
    go_on = threading.Event()
    handle: Any = "late"

    def make() -> Any:
        go_on.wait(5.0)
        return handle

    creating = asyncio.ensure_future(table.actors.create(3, make))
    await asyncio.sleep(0)
    creating.cancel()
    assert not await table.kill(3)
    go_on.set()
    for _ in range(200):
        if table.killed:
            break
        await asyncio.sleep(0.01)
    assert (table.killed, table.asked) == (["late"], [])


async def test_a_refused_call_says_that_there_is_a_successor(table: Table) -> None:
    async def answer(value: object) -> object:
        return value

    assert await table.actors.answer(answer(5)) == 5 and table.num_replaced == 0
    await table.actors.answer(answer(Refused(life=2)))
    assert table.num_replaced == 1
