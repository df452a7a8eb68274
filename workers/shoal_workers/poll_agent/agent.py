"""PollAgent: the Ray actor around NodePolls. One per node and attempt, started by the supervisor.

It ends when the supervisor ends it, with its raylet, or when no supervisor has called for a while. Nothing is lost with
it: workers keep what is not acknowledged, and the supervisor polls them itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

import ray
from shoal_workers.actor_process import exit_with_raylet
from shoal_workers.contract.ids import NAMESPACE
from shoal_workers.contract.messages import NodePoll, PollRequest, Refused
from shoal_workers.poll_agent.node_polls import NodePolls, WorkerAnswer

_NUM_CHECKS = 10
_END_S = 0.05
"""Time between the answer to `end` and the exit."""


class PollAgent:
    """Every call names the life of its supervisor. All methods run on the actor's asyncio loop."""

    def __init__(self, idle_s: float) -> None:
        """`idle_s`: the agent ends after this time without a call."""
        self._handles: dict[str, Any] = {}
        self._node_polls = NodePolls(self._poll_worker)
        self._idle_checks = 0
        exit_with_raylet()
        threading.Thread(target=self._end_when_idle, args=(idle_s,), name="shoal-idle-agent", daemon=True).start()

    async def ping(self, life: int) -> int | Refused:
        """Returns its pid: it is ready to poll."""
        self._idle_checks = 0
        return self._node_polls.refused(life) or os.getpid()

    async def poll(self, requests: Sequence[PollRequest], life: int) -> NodePoll | Refused:
        """See NodePolls.poll."""
        self._idle_checks = 0
        answer = await self._node_polls.poll(requests, life)
        self._idle_checks = 0
        return answer

    async def end(self, life: int) -> Refused | None:
        """Exit. `ray.kill` can be lost with the head, so the agent is also asked itself."""
        if refused := self._node_polls.refused(life):
            return refused
        asyncio.get_running_loop().call_later(_END_S, os._exit, 0)
        return None

    async def _poll_worker(self, request: PollRequest, life: int) -> WorkerAnswer:
        name = request.worker_id
        handle = self._handles.get(name)
        if handle is None:  # the lookup blocks while the head is away
            handle = self._handles[name] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        try:
            answer: WorkerAnswer = await handle.poll.remote(request.after, request.acknowledged, request.wait_s, life)
        except RayError:
            self._handles.pop(name, None)
            raise
        return answer

    def _end_when_idle(self, idle_s: float) -> None:
        """Counts checks, not seconds: a process that was stopped meanwhile has not been idle."""
        while self._idle_checks < _NUM_CHECKS:
            time.sleep(idle_s / _NUM_CHECKS)
            self._idle_checks += 1
        os._exit(0)
