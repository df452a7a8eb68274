"""AgentPool: starts, uses and ends the agents of an attempt as `agent_policy` decides.

Made and called by the executor. It never stands between a worker and the supervisor: whatever happens to an agent, its
workers are polled directly again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from shoal_service.core.attempt.state.worker import silent_nodes
from shoal_service.supervisor.workers.context import SupervisorContext
from shoal_service.supervisor.workers.polling import agent_policy
from shoal_service.supervisor.workers.polling.agent_policy import AgentPhase, NodeAgent
from shoal_service.supervisor.workers.polling.protocol import AgentFailed, PollAgents
from shoal_service.supervisor.workers.polling.worker_polling import WorkerPolling

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_BUSY_S = 0.02
"""All workers of the node are between two polls of their own."""


class AgentPool:
    """Used on the executor's loop only."""

    def __init__(self, agents: PollAgents | None, context: SupervisorContext, agents_from: int) -> None:
        """`agents`: None for none; `agents_from`: see `agent_policy.wanted_nodes`."""
        self._agents = agents
        self._context = context
        self._agents_from = agents_from
        self._known: dict[str, NodeAgent] = {}
        """By node id."""
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._agents is not None and self._agents_from:
            self._spawn(self._watch(self._agents))

    async def close(self) -> None:
        """All workers are polled directly again, and all agents are ended."""
        tasks, known = tuple(self._tasks), tuple(self._known)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._known.clear()
        if self._agents is not None:
            await asyncio.gather(*map(self._agents.end, known))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, agents: PollAgents) -> None:
        clock = self._context.clock
        while True:
            await clock.sleep(_LOOK_S)
            state = self._context.state()
            wanted = agent_policy.wanted_nodes(state, self._agents_from, self._known)
            calm = agent_policy.is_calm(state, clock.time())
            silent = silent_nodes(state.pool)
            due = agent_policy.changes(self._known, wanted, silent, calm=calm, now=clock.monotonic())
            for node_id in due.end:
                self._known.pop(node_id)
                self._serving.pop(node_id).cancel()
                self._spawn(agents.end(node_id))
            for node_id in due.start:
                self._known[node_id] = agent_policy.started(self._known.get(node_id), clock.monotonic())
                self._serving[node_id] = self._spawn(self._start_and_serve(agents, node_id))

    async def _start_and_serve(self, agents: PollAgents, node_id: str) -> None:
        """Returns when the agent has failed."""
        clock = self._context.clock
        try:
            await clock.wait_for(agents.start(node_id), agent_policy.START_S)
            self._known[node_id] = agent_policy.serving(self._known[node_id], clock.monotonic())
            _log.info("agent.serving", extra={"node": node_id})
            await self._serve(agents, node_id)
        except (AgentFailed, TimeoutError) as error:
            agent = self._known[node_id]
            self._known[node_id] = agent_policy.failed(agent, clock.monotonic())
            retry_s = self._known[node_id].retry_at - clock.monotonic()
            words = str(error) or f"it did not answer, {agent.phase}"
            _log.warning("agent.failed", extra={"node": node_id, "error": words, "retry_s": round(retry_s, 1)})
            if agent.phase is AgentPhase.STARTING:  # one that was silent once may only have been short of CPU time
                await agents.end(node_id)

    async def _serve(self, agents: PollAgents, node_id: str) -> None:
        """Polls the node's workers through its agent; raises AgentFailed or TimeoutError."""
        clock = self._context.clock
        taken: dict[str, WorkerPolling] = {}
        try:
            while True:
                here = [one for one in self._context.polled.values() if one.node_id == node_id]
                taken = {one.worker_id: one for one in here if one.take_over()}
                if not taken:
                    await clock.sleep(_BUSY_S)
                    continue
                requests = tuple(one.request() for one in taken.values())
                limit_s = agent_policy.silent_after_s(max(request.wait_s for request in requests))
                answer = await clock.wait_for(agents.poll(node_id, requests), limit_s)
                answered = [
                    (taken[poll.worker_id], poll)
                    for poll in answer.polls
                    if poll.worker_id in taken and taken[poll.worker_id].is_taken_over
                ]
                for one, poll in answered:
                    one.receive(poll)
                for worker_id in answer.failed:
                    if worker_id in taken:
                        taken[worker_id].fail()
                if answered:
                    await self._context.settled()
                for one, _ in answered:
                    one.handled()
        finally:
            for one in taken.values():
                one.release()
