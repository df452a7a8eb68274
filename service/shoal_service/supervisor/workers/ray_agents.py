"""RayAgents: the agents of one attempt as Ray actors. Starts, finds, calls and ends them; decides nothing.

Made by `supervisor/actor.py`, called by the AgentPool. Creating an actor waits for the Ray head, and killing one may;
both run on threads of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

import ray
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import end_replaced_process
from shoal_service.supervisor.protocols import AgentFailed
from shoal_service.supervisor.workers.processes import agent_environment
from shoal_service.supervisor.workers.ray_fleet import first_line
from shoal_workers.contract import NAMESPACE, NodePoll, PollRequest, Refused, agent_name
from shoal_workers.poll_agent.agent import PollAgent

_NODE_ID = "ray.io/node-id"
_IDLE_S = 30.0
"""An agent that gets no call for this long ends by itself: the supervisor is gone, or does not need it any more."""
_KILL_S = 0.3
_NUM_THREADS = 4


class RayAgents:
    """Holds actor handles by node id. The real `protocols.PollAgents`."""

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        life: int = 1,
        on_replaced: Callable[[], None] = end_replaced_process,
        idle_s: float = _IDLE_S,
    ) -> None:
        """`on_replaced`: called when an agent refuses a call, since it obeys a later supervisor; must not return."""
        self._config = config
        self._life = life
        self._on_replaced = on_replaced
        self._idle_s = idle_s
        self._handles: dict[str, ActorHandle] = {}
        self._creating: dict[str, Future[ActorHandle]] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="agents")
        self._actor_class = ray.remote(PollAgent)

    async def start(self, node_id: str) -> None:
        creating = self._creating[node_id] = self._threads.submit(self._create, node_id)
        try:
            handle = await asyncio.shield(asyncio.wrap_future(creating))
        except RayError as error:
            self._creating.pop(node_id, None)
            raise AgentFailed(first_line(error)) from error
        self._creating.pop(node_id, None)  # not when this is cancelled: Ray may still create the actor; `end` follows
        self._handles[node_id] = handle
        await self._answer(handle.ping.remote(self._life))

    async def poll(self, node_id: str, requests: Sequence[PollRequest]) -> NodePoll:
        handle = self._handles.get(node_id)
        if handle is None:
            raise AgentFailed("the agent was not started")
        answer: NodePoll = await self._answer(handle.poll.remote(tuple(requests), self._life))
        return answer

    async def end(self, node_id: str) -> None:
        if creating := self._creating.pop(node_id, None):
            self._threads.submit(creating.add_done_callback, _kill_created)
        handle = self._handles.pop(node_id, None)
        if handle is None:
            return
        handle.end.remote(self._life)
        loop = asyncio.get_running_loop()
        killing = loop.run_in_executor(self._threads, partial(ray.kill, handle, no_restart=True))
        await asyncio.wait({killing}, timeout=_KILL_S)

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            answer = await call
        except RayError as error:
            raise AgentFailed(first_line(error)) from error
        if isinstance(answer, Refused):
            self._on_replaced()
        return answer

    def _create(self, node_id: str) -> ActorHandle:
        """Creates the agent of this name, or finds the one that a predecessor has started."""
        return self._actor_class.options(
            name=agent_name(self._config.job_id, self._config.attempt, node_id),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            label_selector={_NODE_ID: node_id},
            runtime_env=agent_environment(self._config),
        ).remote(self._idle_s)


def _kill_created(creating: Future[ActorHandle]) -> None:
    """Kills an agent that was ended before Ray had created it. Not on the loop, since it waits for the head."""
    if not creating.cancelled() and creating.exception() is None:
        ray.kill(creating.result(), no_restart=True)
