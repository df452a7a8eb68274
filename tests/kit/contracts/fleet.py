"""What every Fleet does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal_service.core.attempt.messages import StartWorker
from shoal_service.supervisor.protocols import Fleet, WorkerDied
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment, ErrorReport, ExitKind, Phase, WorkerInfo

_PATIENCE_S = 60.0


def assignment(generation: int, *, life: int = 1) -> Assignment:
    return Assignment(
        life=life,
        job_id="contract",
        attempt=1,
        generation=generation,
        rank=0,
        layout=fully_sharded(1),
        store_host="127.0.0.1",
        store_port=1,
        restore_from=None,
    )


async def eventually(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Ray reports some things late, and announces none of them."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (found := await condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return found


class FleetContract:
    """One attempt per test; its workers end with the test."""

    def make(
        self, *, can_load_task: bool = True, life: int = 1, on_replaced: Callable[[], None] = lambda: None
    ) -> Fleet:
        """The fleet of one supervisor of the attempt."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """A worker's name, another one in each test."""
        raise NotImplementedError

    def end_process(self, info: WorkerInfo) -> None:
        """SIGKILL."""
        raise NotImplementedError

    async def started(self, fleet: Fleet, index: int = 0) -> WorkerInfo:
        await fleet.start(StartWorker(index, self.name(index)))
        info = await fleet.prepare(index)
        assert isinstance(info, WorkerInfo)
        return info

    async def test_a_worker_that_was_started_becomes_warm_and_is_known_with_its_node(self) -> None:
        fleet = self.make()
        assert not fleet.knows(0)
        info = await self.started(fleet)
        assert info.worker_id == self.name(0) and info.store_port > 0
        assert fleet.knows(0) and fleet.by_node() == {info.node_id: [0]}
        assert await fleet.prepare(0) == info, "it can be repeated"

    async def test_a_task_that_cannot_be_loaded_is_an_answer(self) -> None:
        fleet = self.make(can_load_task=False)
        await fleet.start(StartWorker(0, self.name(0)))
        answer = await fleet.prepare(0)
        assert isinstance(answer, ErrorReport) and answer.phase is Phase.PREPARING

    async def test_a_poll_returns_after_its_time_with_the_progress(self) -> None:
        fleet = self.make()
        await self.started(fleet)
        first = await fleet.poll(0, 0, 0, 0.0)
        poll = await fleet.poll(0, first.seq, first.seq, 0.05)
        assert poll.worker_id == self.name(0) and poll.reports == ()
        assert poll.progress.generation == 0

    async def test_an_order_is_carried_out_while_a_poll_waits(self) -> None:
        fleet = self.make()
        await self.started(fleet)
        first = await fleet.poll(0, 0, 0, 0.0)
        waiting = asyncio.ensure_future(fleet.poll(0, first.seq, first.seq, 20.0))
        await asyncio.sleep(0)  # it is sent
        await fleet.request_yield(0, 1, False)
        assert not waiting.done()
        waiting.cancel()

    async def test_a_run_of_a_fenced_generation_is_stale_and_can_be_joined(self) -> None:
        fleet = self.make()
        await self.started(fleet)
        await fleet.interrupt(0, 3)
        worker_exit = await fleet.run(0, assignment(3))
        assert (worker_exit.kind, worker_exit.generation) == (ExitKind.STALE, 3)
        assert await fleet.join(0, 3) == worker_exit
        assert (await fleet.join(0, 2)).kind is ExitKind.STALE

    async def test_a_repeated_run_has_the_same_answer(self) -> None:
        fleet = self.make()
        await self.started(fleet)
        await fleet.interrupt(0, 3)
        worker_exit = await fleet.run(0, assignment(3))
        successor = self.make(life=2)
        assert successor.find(0, self.name(0), None)
        await successor.adopt(0, 3)
        assert await successor.run(0, assignment(3, life=1)) == worker_exit, "an order of its predecessor"

    async def test_a_worker_that_is_started_twice_under_one_name_is_one_worker(self) -> None:
        info = await self.started(self.make())
        assert await self.started(self.make(life=2)) == info

    async def test_a_supervisor_whose_successor_has_called_is_refused_by_every_call(self) -> None:
        class Ended(BaseException):
            """The process of the replaced supervisor."""

        def end() -> None:
            raise Ended

        older, newer = self.make(on_replaced=end), self.make(life=2)
        info = await self.started(older)
        assert newer.find(0, self.name(0), info)
        await newer.adopt(0, 0)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: older.prepare(0),
            lambda: older.run(0, assignment(1)),
            lambda: older.join(0, 1),
            lambda: older.interrupt(0, 9),
            lambda: older.request_yield(0, 9, True),
            lambda: older.snapshot_parts(0),
            lambda: older.forget_snapshots(0),
            lambda: older.adopt(0, 0),
            lambda: older.poll(0, 0, 0, 0.0),
        ]
        for call in calls:
            with pytest.raises(Ended):
                await call()
        assert (await newer.poll(0, 0, 0, 0.0)).num_refused == len(calls)

    async def test_a_new_worker_holds_no_snapshots_and_accepts_requests(self) -> None:
        fleet = self.make()
        await self.started(fleet)
        assert await fleet.snapshot_parts(0) == ()
        await fleet.request_yield(0, 1, True)
        await fleet.note_commit(0, 1, 20, "")
        await fleet.forget_snapshots(0)

    async def test_the_next_supervisor_finds_a_worker_by_its_name(self) -> None:
        info = await self.started(self.make())
        second = self.make()
        assert second.find(0, self.name(0), info) and second.knows(0)
        assert second.by_node() == {info.node_id: [0]}
        assert (await second.poll(0, 0, 0, 0.0)).worker_id == self.name(0)
        assert not second.find(1, self.name(1), None) and not second.knows(1)

    async def test_a_killed_worker_is_not_known_and_not_found(self) -> None:
        fleet, second = self.make(), self.make()
        info = await self.started(fleet)
        await fleet.kill(0)
        assert not fleet.knows(0) and fleet.by_node() == {} and fleet.actor_id(0) is None

        async def is_gone() -> bool:
            return not second.find(0, self.name(0), info)

        await eventually(is_gone)
        await fleet.kill(0)  # a worker that is not known: nothing happens

    async def test_a_forgotten_worker_continues(self) -> None:
        fleet = self.make()
        info = await self.started(fleet)
        fleet.forget(0)
        assert not fleet.knows(0) and fleet.by_node() == {}
        assert fleet.find(0, self.name(0), info)

    async def test_the_death_of_a_worker_fails_its_calls_and_is_dated(self) -> None:
        fleet = self.make()
        info = await self.started(fleet)
        seq = (await fleet.poll(0, 0, 0, 0.0)).seq
        pending = asyncio.create_task(fleet.poll(0, seq, seq, _PATIENCE_S))
        await asyncio.sleep(0)
        self.end_process(info)
        with pytest.raises(WorkerDied) as error:
            await pending
        assert error.value.cause is IncidentCause.WORKER_DIED and "\n" not in str(error.value)
        with pytest.raises(WorkerDied):
            await fleet.poll(0, 0, 0, 0.0)
        actor_id = fleet.actor_id(0)
        assert actor_id is not None
        assert await eventually(lambda: fleet.died_at(actor_id)) > 0

    async def test_the_end_of_a_worker_is_described_in_the_words_of_the_operating_system(self) -> None:
        fleet = self.make()
        info = await self.started(fleet)
        await fleet.start(StartWorker(1, self.name(1), (), info.node_id))
        await fleet.prepare(1)
        assert await fleet.exit_words(info) is None, "it is alive"
        self.end_process(info)
        assert await eventually(lambda: fleet.exit_words(info)) == "was killed by signal 9 (SIGKILL)"
