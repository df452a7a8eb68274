"""How the workers of an attempt are polled: each by a call of its own, or all of a node by one call to its agent.

    time ------------------------------------------------------------------------------------------------------>

    worker a    <- poll ........ <- poll ..x            <- poll (of the agent) ......... <- poll ..x      <- poll
    worker b    <- poll .. <- poll ........x            <- poll (of the agent) ......... <- poll ..x      <- poll
    agent                     start, ping  |  <= poll(a, b) ...... <= poll(a, b) ............X SIGKILL    |
    supervisor  polls a and b directly     |  one call at a time for the node                | directly   | (until it
                                           |                                                 | again      | is started
                                    takes over: the direct calls                  call failed, or had      again)
                                    in flight are given up                        no answer in time

An agent is an optimisation. The positions (what was received, what is acknowledged) are the supervisor's, and a worker
keeps what is not acknowledged, so a poll that is given up or answered twice changes nothing. Whatever happens to an
agent, its workers are polled directly again. Hidden here: which nodes have an agent, and when.

    a node has an agent     it has NODE_WORKERS warm workers of a job with `agents_from` or more
    it is started           once the group has trained for CALM_S: a start takes CPU time from the workers of its node
    it failed, no answer    its workers are polled directly at once; it is started again after 2, 4, 8 ... 60 s
    the node needs none     any more: the agent is ended

Made and called by the executor. It never decides what a report means. `ray_fleet` has the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shoal_service.clock import cancel_all
from shoal_service.core.attempt.state import Attempt, Stage, silent_nodes
from shoal_service.supervisor.protocols import AgentFailed, PollAgents
from shoal_service.supervisor.workers.worker_client import SupervisorContext, WorkerPolling
from shoal_workers.contract.backoff import backoff_s

_log = logging.getLogger(__name__)
_CHECK_S = 1.0
_BUSY_S = 0.02
"""Pause before the next try, when all workers of the node are between two direct polls."""


class AgentPool:
    """Starts and ends the agents of one attempt, and polls through them. Used on the executor's loop only."""

    def __init__(self, agents: PollAgents | None, context: SupervisorContext, agents_from: int) -> None:
        """`agents`: None if the attempt has no agents; `agents_from`: see `choose_nodes`."""
        self._agents = agents
        self._context = context
        self._agents_from = agents_from
        self._node_agents: dict[str, NodeAgent] = {}
        """Agents by node id."""
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._agents is not None and self._agents_from:
            self._spawn(self._watch(self._agents))

    async def close(self) -> None:
        """Ends all agents. All workers are polled directly again."""
        tasks, node_ids = tuple(self._tasks), tuple(self._node_agents)
        await cancel_all(tasks)
        self._node_agents.clear()
        if self._agents is not None:
            await asyncio.gather(*map(self._agents.end, node_ids))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, agents: PollAgents) -> None:
        clock = self._context.clock
        while True:
            await clock.sleep(_CHECK_S)
            state, now_mono = self._context.state(), clock.monotonic()
            chosen = choose_nodes(state, self._agents_from, self._node_agents)
            calm, silent = is_calm(state, clock.time()), silent_nodes(state.pool)
            due = find_due_changes(self._node_agents, chosen, silent, calm=calm, now=now_mono)
            for node_id in due.end:
                self._node_agents.pop(node_id)
                self._serving.pop(node_id).cancel()
                self._spawn(agents.end(node_id))
            for node_id in due.start:
                self._node_agents[node_id] = NodeAgent.started(self._node_agents.get(node_id), clock.monotonic())
                self._serving[node_id] = self._spawn(self._start_and_serve(agents, node_id))

    async def _start_and_serve(self, agents: PollAgents, node_id: str) -> None:
        """Starts the agent and polls through it until it fails."""
        clock = self._context.clock
        try:
            await clock.wait_for(agents.start(node_id), START_S)
            self._node_agents[node_id] = self._node_agents[node_id].serving(clock.monotonic())
            _log.info("agent.serving", extra={"node": node_id})
            await self._serve(agents, node_id)
        except (AgentFailed, TimeoutError) as error:
            agent = self._node_agents[node_id]
            self._node_agents[node_id] = agent.failed(clock.monotonic())
            retry_s = self._node_agents[node_id].retry_at - clock.monotonic()
            message = str(error) or f"it did not answer, {agent.phase}"
            _log.warning("agent.failed", extra={"node": node_id, "error": message, "retry_s": round(retry_s, 1)})
            if agent.phase is AgentPhase.STARTING:  # one that was late once may only have been short of CPU time
                await agents.end(node_id)

    async def _serve(self, agents: PollAgents, node_id: str) -> None:
        """Polls the node's workers through its agent; raises AgentFailed or TimeoutError."""
        clock = self._context.clock
        taken: dict[str, WorkerPolling] = {}
        try:
            while True:
                workers = [worker for worker in self._context.polled.values() if worker.node_id == node_id]
                taken = {worker.worker_id: worker for worker in workers if worker.take_over()}
                if not taken:
                    await clock.sleep(_BUSY_S)
                    continue
                requests = tuple(worker.request() for worker in taken.values())
                limit_s = answer_limit_s(max(request.wait_s for request in requests))
                answer = await clock.wait_for(agents.poll(node_id, requests), limit_s)
                answered = [
                    (taken[poll.worker_id], poll)
                    for poll in answer.polls
                    if poll.worker_id in taken and taken[poll.worker_id].is_taken_over
                ]
                for worker, poll in answered:
                    worker.receive(poll)
                for worker_id in answer.failed:
                    if worker_id in taken:
                        taken[worker_id].fail()
                if answered:
                    await self._context.settled()  # `handled` notes what the outbox has once the machine is done
                for worker, _ in answered:
                    worker.handled()
        finally:
            for worker in taken.values():
                worker.release()


NODE_WORKERS = 8
"""Number of workers on a node from which an agent pays. With fewer it costs ten times the CPU time that it saves the
supervisor."""
CALM_S = 5.0
START_S = 30.0
"""An agent that does not answer this long after its start is ended."""
_ANSWER_MARGIN_S = 0.5
_FIRST_RETRY_S = 2.0
_LAST_RETRY_S = 60.0
_PROVEN_S = 60.0
"""An agent that has served this long begins its back-off anew."""


class AgentPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    """The agent's workers are polled directly until `NodeAgent.retry_at`."""


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """The agent of one node."""

    phase: AgentPhase
    since: float
    num_failures: int = 0
    """Number of failures in a row."""

    @staticmethod
    def started(before: NodeAgent | None, now: float) -> NodeAgent:
        """Return the agent at its start. `before`: the one before it on this node; None if there was none."""
        return NodeAgent(AgentPhase.STARTING, now, before.num_failures if before is not None else 0)

    def serving(self, now: float) -> NodeAgent:
        return replace(self, phase=AgentPhase.SERVING, since=now)

    def failed(self, now: float) -> NodeAgent:
        is_proven = self.phase is AgentPhase.SERVING and now - self.since >= _PROVEN_S
        return NodeAgent(AgentPhase.FAILED, now, 1 if is_proven else self.num_failures + 1)

    @property
    def retry_at(self) -> float:
        return self.since + backoff_s(max(1, self.num_failures), first_s=_FIRST_RETRY_S, longest_s=_LAST_RETRY_S)


@dataclass(frozen=True, slots=True)
class AgentChanges:
    start: tuple[str, ...] = ()
    """Ids of the nodes whose agents are to be started."""
    end: tuple[str, ...] = ()


def choose_nodes(state: Attempt, agents_from: int, with_agents: Collection[str] = ()) -> frozenset[str]:
    """Choose the nodes whose workers an agent should poll.

    Args:
        agents_from: workers of a job from which on its nodes get agents; 0 if none do.
        with_agents: nodes that have an agent. They keep it down to half of the numbers, so a lost worker does not end
            agents that are due again soon.
    """
    counts = Counter(worker.node_id for worker in state.pool.workers if worker.warm)
    num = counts.total()
    if not agents_from or state.stage is Stage.ENDED:
        return frozenset()
    per_node = min(NODE_WORKERS, agents_from)
    return frozenset(
        node
        for node, number in counts.items()
        if (number >= per_node and num >= agents_from)
        or (node in with_agents and 2 * number >= per_node and 2 * num >= agents_from)
    )


def is_calm(state: Attempt, now: float) -> bool:
    """Return whether the group has trained for a while, so that a start of processes delays no recovery."""
    has_trained = state.progress.step > state.group.start_step or state.target.is_script
    is_trained = state.stage is Stage.RUNNING and has_trained
    return is_trained and now - state.current.since >= CALM_S


def find_due_changes(
    agents: Mapping[str, NodeAgent], chosen: frozenset[str], silent: frozenset[str], *, calm: bool, now: float
) -> AgentChanges:
    """Find which agents to start and to end now.

    Args:
        agents: by node id, all that were started and not ended.
        chosen: nodes that should have one.
        silent: nodes that do not answer.
    """
    due = (
        node
        for node in chosen - silent
        if node not in agents or (agents[node].phase is AgentPhase.FAILED and now >= agents[node].retry_at)
    )
    return AgentChanges(
        start=tuple(sorted(due)) if calm else (),
        end=tuple(sorted(agents.keys() - chosen)),
    )


def answer_limit_s(wait_s: float) -> float:
    """Return how long a call to an agent may take if the polls of its workers may wait `wait_s`."""
    return wait_s + _ANSWER_MARGIN_S
