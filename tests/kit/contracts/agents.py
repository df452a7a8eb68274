"""What all PollAgents do."""

import asyncio
from collections.abc import Callable

import pytest

from kit.contracts.fleet import eventually
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.supervisor.protocols import AgentFailed, Fleet, PollAgents
from shoal_workers.contract.messages import PollRequest, WorkerPoll


class AgentsContract:
    """One attempt per test, on one node; its workers and its agent end with the test."""

    def make(self, *, life: int = 1, on_replaced: Callable[[], None] = lambda: None) -> PollAgents:
        """The calls of one supervisor of the attempt."""
        raise NotImplementedError

    def fleet(self, *, life: int = 1) -> Fleet:
        raise NotImplementedError

    @property
    def node(self) -> str:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """A worker's name, another one in each test."""
        raise NotImplementedError

    async def kill_agent(self) -> None:
        """SIGKILL of the node's agent."""
        raise NotImplementedError

    async def started(self, *indexes: int) -> PollAgents:
        """With workers that were polled once."""
        fleet, agents = self.fleet(), self.make()
        for index in indexes:
            await fleet.start(StartWorker(index, self.name(index), (), self.node))
            await fleet.poll(index, 0, 0, 0.0)
        await agents.start(self.node)
        return agents

    async def polled(self, agents: PollAgents, index: int) -> tuple[WorkerPoll, ...]:
        """Empty: the worker has not answered in time."""
        return (await agents.poll(self.node, [self.request(index)])).polls

    def request(self, index: int, *, wait_s: float = 0.0) -> PollRequest:
        return PollRequest(worker_id=self.name(index), after=0, acknowledged=0, wait_s=wait_s)

    async def test_one_call_brings_the_polls_of_several_workers(self) -> None:
        agents = await self.started(0, 1)
        found: set[str] = set()

        async def both() -> bool:
            answer = await agents.poll(self.node, [self.request(0), self.request(1)])
            assert answer.failed == ()
            found.update(poll.worker_id for poll in answer.polls)
            return found == {self.name(0), self.name(1)}

        await eventually(both)

    async def test_a_worker_that_cannot_be_polled_is_named_and_the_others_answer(self) -> None:
        agents = await self.started(0)
        answers = []

        async def both() -> bool:
            answers.append(await agents.poll(self.node, [self.request(0), self.request(1)]))
            assert all(poll.worker_id == self.name(0) for one in answers for poll in one.polls)
            assert all(one.failed in ((), (self.name(1),)) for one in answers)
            return any(one.failed for one in answers) and any(one.polls for one in answers)

        await eventually(both)

    async def test_an_agent_that_was_not_started_has_failed(self) -> None:
        with pytest.raises(AgentFailed):
            await self.make().poll(self.node, [self.request(0)])

    async def test_a_killed_agent_fails_its_calls_and_can_be_started_again(self) -> None:
        agents = await self.started(0)
        [first] = await eventually(lambda: self.polled(agents, 0))
        request = self.request(0, wait_s=60.0).model_copy(update={"after": first.seq})
        pending = asyncio.create_task(agents.poll(self.node, [request]))
        await asyncio.sleep(0)
        await self.kill_agent()
        with pytest.raises(AgentFailed) as error:
            await pending
        assert "\n" not in str(error.value)

        async def restarted() -> bool:
            try:
                await agents.start(self.node)
            except AgentFailed:
                return False
            return True

        await eventually(restarted)
        [again] = await eventually(lambda: self.polled(agents, 0))
        assert again.worker_id == self.name(0)

    async def test_the_next_supervisor_finds_the_agent_and_the_one_before_is_refused(self) -> None:
        class Ended(BaseException):
            """The process of the replaced supervisor."""

        def end() -> None:
            raise Ended

        await self.started(0)
        older, newer = self.make(on_replaced=end), self.make(life=2)
        await older.start(self.node)
        await newer.start(self.node)
        [poll] = await eventually(lambda: self.polled(newer, 0))
        assert poll.worker_id == self.name(0)
        with pytest.raises(Ended):
            await older.poll(self.node, [self.request(0)])
        await older.end(self.node)

    async def test_a_supervisor_whose_worker_has_a_later_one_is_refused_through_the_agent(self) -> None:
        class Ended(BaseException):
            """The process of the replaced supervisor."""

        def end() -> None:
            raise Ended

        await self.started(0)
        older = self.make(on_replaced=end)
        await older.start(self.node)
        newer = self.fleet(life=2)
        assert newer.find(0, self.name(0), None)
        await newer.adopt(0, 0)
        with pytest.raises(Ended):
            await older.poll(self.node, [self.request(0)])

    async def test_an_ended_agent_answers_no_more_and_an_unknown_one_is_ended_without_error(self) -> None:
        agents = await self.started(0)
        await agents.end(self.node)
        await agents.end(self.node)
        with pytest.raises(AgentFailed):
            await agents.poll(self.node, [self.request(0)])
