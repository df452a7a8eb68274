"""PollAgent: the Ray actor around NodePolls. One per node and attempt, started by the supervisor.

It ends when the supervisor ends it, with its raylet, or when no supervisor has called for a while. Nothing is lost with
it: workers keep what is not acknowledged, and the supervisor polls them itself.

NodePolls keeps one long poll of each worker in flight, and collects the answers, without Ray:

    supervisor  --- poll(a: after 7, b: after 3) --->  agent  --- poll(after 7) --->  worker a
                                                              --- poll(after 3) --->  worker b
                <-- NodePoll(a: 8..9) ---------------         <-- 8, 9 ------------   worker a
                                                                                      (b is still waited for)
                --- poll(a: after 9, b: after 3) --->         --- poll(after 9) --->  worker a

The positions are the supervisor's: an answer that it did not get is requested again by its next call. A poll in flight
stays in flight as long as the next call asks for the same position.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

import ray
from shoal_workers.actor_process import exit_with_raylet
from shoal_workers.contract import NAMESPACE, NodePoll, PollRequest, Refused, WorkerPoll

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
        """Return its pid: it is ready to poll."""
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


WorkerAnswer = WorkerPoll | Refused
PollWorker = Callable[[PollRequest, int], Awaitable[WorkerAnswer]]
"""Polls one worker for the supervisor of this life. Any exception: the worker has to be polled by the supervisor."""
_GATHER_S = 0.05
_GATHER_NEW_S = 0.002
"""The same time for an answer with something new."""
_GRACE_S = 0.1
"""A worker answers a little after the time that its poll may wait."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    after: int
    answer: asyncio.Future[WorkerAnswer]

    @property
    def is_answered(self) -> bool:
        return self.answer.done()

    @property
    def brings_something(self) -> bool:
        """Something that is not only the progress: reports, log lines, a refusal or a failure."""
        if not self.answer.done():
            return False
        if self.answer.cancelled() or self.answer.exception() is not None:
            return True
        poll = self.answer.result()
        return isinstance(poll, Refused) or bool(poll.reports or poll.logs)


class NodePolls:
    """Used on one asyncio loop."""

    def __init__(self, poll_worker: PollWorker, *, gather_s: float = _GATHER_S) -> None:
        """`gather_s`: answers without anything new are sent together with others that arrive within this time."""
        self._poll_worker = poll_worker
        self._gather_s = gather_s
        self._in_flight: dict[str, _InFlight] = {}
        """By worker id."""
        self._life = 0
        """Life of the newest supervisor that has called."""
        self._newest_call = 0

    async def poll(self, requests: Sequence[PollRequest], life: int) -> NodePoll | Refused:
        """Return when a worker has answered, or after the longest `wait_s` of the requests.

        A call that a later one has overtaken returns nothing: its supervisor has given it up.
        """
        if refused := self.refused(life):
            return refused
        self._newest_call += 1
        call = self._newest_call
        self._request(requests, life)
        await self._wait(max((request.wait_s for request in requests), default=0.0) + _GRACE_S)
        return self._collect() if call == self._newest_call else NodePoll()

    def refused(self, life: int) -> Refused | None:
        """Return None if the caller is the newest supervisor so far. What its predecessor has requested is dropped."""
        if life < self._life:
            return Refused(life=self._life)
        if life > self._life:
            self._life = life
            self._drop(self._in_flight)
        return None

    def _request(self, requests: Sequence[PollRequest], life: int) -> None:
        by_worker = {request.worker_id: request for request in requests}
        moved = {
            name: poll
            for name, poll in self._in_flight.items()
            if name not in by_worker or by_worker[name].after != poll.after
        }
        self._drop(moved)
        for name, request in by_worker.items():
            if name not in self._in_flight:
                wait_s = until_common_end(asyncio.get_running_loop().time(), request.wait_s)
                aligned = request.model_copy(update={"wait_s": wait_s})
                answer = asyncio.ensure_future(self._poll_worker(aligned, life))
                answer.add_done_callback(_retrieve)
                self._in_flight[name] = _InFlight(request.after, answer)

    def _drop(self, dropped: dict[str, _InFlight]) -> None:
        for name in tuple(dropped):
            self._in_flight.pop(name).answer.cancel()

    async def _wait(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while True:
            waiting = [poll.answer for poll in self._in_flight.values() if not poll.is_answered]
            if len(waiting) < len(self._in_flight):
                is_new = any(poll.brings_something for poll in self._in_flight.values())
                end = min(end, loop.time() + (_GATHER_NEW_S if is_new else self._gather_s))
            left_s = end - loop.time()
            if not waiting or left_s <= 0:
                return
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _collect(self) -> NodePoll | Refused:
        polls: list[WorkerPoll] = []
        failed: list[str] = []
        for name, poll in tuple(self._in_flight.items()):
            if not poll.is_answered:
                continue
            del self._in_flight[name]
            if poll.answer.cancelled() or poll.answer.exception() is not None:
                failed.append(name)
                continue
            answer = poll.answer.result()
            if isinstance(answer, Refused):
                return answer
            polls.append(answer)
        return NodePoll(polls=tuple(polls), failed=tuple(failed))


def until_common_end(now: float, wait_s: float) -> float:
    """How long a poll that begins now waits, at most `wait_s` and more than half of it. Polls that begin at different
    times end at few times in common, so their answers travel together."""
    half_s = wait_s / 2
    return math.floor((now + wait_s) / half_s) * half_s - now if half_s else 0.0


def _retrieve(answer: asyncio.Future[WorkerAnswer]) -> None:
    """asyncio logs errors that are not asked for, and the answer may be dropped."""
    if not answer.cancelled():
        answer.exception()
