"""FakeAgents: the calls of one supervisor to FakeAgentProcesses, which outlive it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from doubles.fake_workers import FakeWorkers
from shoal_service.supervisor.protocols import AgentFailed, WorkerCallError
from shoal_workers.contract.messages import NodePoll, PollRequest, Refused, WorkerPoll


@dataclass
class FakeAgentProcess:
    """One agent. A test makes it silent, or ends it."""

    life: int = 0
    is_silent: bool = False
    """It answers no call."""
    is_dead: bool = False
    requests: list[tuple[PollRequest, ...]] = field(default_factory=list)
    in_flight: dict[str, tuple[int, asyncio.Task[WorkerPoll | Refused]]] = field(default_factory=dict)
    """By worker id: after which number it is polled."""
    _calls: set[asyncio.Future[Any]] = field(default_factory=set)

    def die(self) -> None:
        """Every call fails, also those in flight."""
        self.is_dead = True
        for call in self._calls:
            if not call.done():
                call.set_exception(AgentFailed("the agent was killed"))

    async def call(self, work: asyncio.Future[Any]) -> Any:
        broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.add(broken)
        try:
            if self.is_dead:
                raise AgentFailed("the agent has ended")
            waited = {broken} if self.is_silent else {work, broken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return broken.result() if broken.done() else work.result()
        finally:
            work.cancel()
            self._calls.discard(broken)


class FakeAgents:
    """A `polling.protocol.PollAgents`."""

    def __init__(
        self,
        workers: FakeWorkers,
        processes: dict[str, FakeAgentProcess] | None = None,
        *,
        life: int = 1,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """`processes`: by node id; shared by the supervisors of an attempt."""
        self.life = life
        self.processes = processes if processes is not None else {}
        self.started: list[str] = []
        """Node ids, one for each new process."""
        self.refuses_to_start = False
        self._workers = workers
        self._on_replaced = on_replaced

    async def start(self, node_id: str) -> None:
        if self.refuses_to_start:
            raise AgentFailed("there is no room for a process")
        known = self.processes.get(node_id)
        if known is None or known.is_dead:
            self.processes[node_id] = FakeAgentProcess()
            self.started.append(node_id)
        await self._answer(node_id, asyncio.ensure_future(asyncio.sleep(0)))

    async def poll(self, node_id: str, requests: Sequence[PollRequest]) -> NodePoll:
        if node_id not in self.processes:
            raise AgentFailed("the agent was not started")
        self.processes[node_id].requests.append(tuple(requests))
        answer: NodePoll | Refused = await self._answer(
            node_id, asyncio.ensure_future(self._poll(self.processes[node_id], requests))
        )
        if isinstance(answer, Refused):
            await self._replaced()
        assert isinstance(answer, NodePoll)
        return answer

    async def end(self, node_id: str) -> None:
        process = self.processes.get(node_id)
        if process is not None and self.life >= process.life:
            process.die()
            del self.processes[node_id]

    async def _answer(self, node_id: str, work: asyncio.Future[Any]) -> Any:
        process = self.processes[node_id]
        if self.life < process.life and not process.is_dead:
            work.cancel()
            await self._replaced()
        process.life = self.life
        return await process.call(work)

    async def _replaced(self) -> None:
        self._on_replaced()
        await asyncio.get_running_loop().create_future()  # the process has ended

    async def _poll(self, process: FakeAgentProcess, requests: Sequence[PollRequest]) -> NodePoll | Refused:
        """As the real one: returns with the first answer; the other polls stay in flight."""
        in_flight = process.in_flight
        for request in requests:
            after, known = in_flight.get(request.worker_id, (-1, None))
            if known is None or after != request.after:
                if known is not None:
                    known.cancel()
                task = asyncio.ensure_future(self._poll_worker(request))
                task.add_done_callback(lambda one: one.cancelled() or one.exception())  # retrieved in any case
                in_flight[request.worker_id] = request.after, task
        await asyncio.wait([task for _, task in in_flight.values()], return_when=asyncio.FIRST_COMPLETED)
        done = {name: task for name, (_, task) in in_flight.items() if task.done()}
        for name in done:
            del in_flight[name]
        answers = [task.result() for task in done.values() if task.exception() is None]
        if refused := next((one for one in answers if isinstance(one, Refused)), None):
            return refused
        return NodePoll(
            polls=tuple(one for one in answers if isinstance(one, WorkerPoll)),
            failed=tuple(name for name, task in done.items() if task.exception() is not None),
        )

    async def _poll_worker(self, request: PollRequest) -> WorkerPoll | Refused:
        worker = self._workers.by_name.get(request.worker_id)
        if worker is None:
            raise WorkerCallError(f"there is no worker {request.worker_id}")
        if worker.refuses(self.life):
            return Refused(life=worker.life)
        return await worker.call(worker.poll(request.after, request.acknowledged, request.wait_s))
