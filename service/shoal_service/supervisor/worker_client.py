"""WorkerClient: everything that is asked of one worker, and how its answers, or their failing, become events.

One per living worker. It holds no state of the attempt and decides nothing; the machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from shoal_service.cluster import gcs
from shoal_service.core.attempt.events import (
    Beat,
    DeathDated,
    Event,
    InterruptAcknowledged,
    ReportArrived,
    RunReturned,
    SnapshotPartsReported,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.supervisor import liveness_probe
from shoal_service.supervisor.fleet import Fleet, cause_of
from shoal_service.supervisor.outbox import Outbox
from shoal_service.supervisor.reporter import Reporter
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Assignment, ErrorReport, Phase, Progress, WorkerInfo

_log = logging.getLogger(__name__)
_POLL_WAIT_S = 1.0
"""A poll is answered at once when there is news. Without any it says at least so often that the worker answers, and
how far its training thread is."""
_POLL_CLOSELY_S = 0.25
"""... and so long once it has stood still for half of what makes a hang: what is known of it must not be old then."""
_RETRY_S = 0.25
_FAREWELL_S = 1.0


@dataclass(frozen=True, slots=True)
class SupervisorContext:
    """What all clients of an attempt share; made by the executor."""

    fleet: Fleet
    outbox: Outbox
    reporter: Reporter
    post: Callable[[Event], None]
    settled: Callable[[], Awaitable[None]]
    """Waits until everything that was posted has been decided upon."""
    state: Callable[[], Attempt]
    kill: Callable[[int], None]
    """End a worker of this index for good."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """For work that outlives the client."""
    raylet: Callable[[str], tuple[str, int] | None]
    """Address and port of a node's raylet, by the node's id; None: not known."""


class WorkerClient:
    """Called on the executor's loop only. Each public method but `farewell` returns at once."""

    def __init__(self, index: int, worker_id: str, context: SupervisorContext) -> None:
        self.index = index
        self._worker_id = worker_id
        self._context = context
        self._fleet = context.fleet
        self._post = context.post
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard = 0
        """Up to which number the worker was listened to."""

    def start(self, avoid_nodes: tuple[str, ...], only_on: str) -> None:
        """Start the worker and bring it up."""
        self._spawn(self._start(avoid_nodes, only_on))

    def bring_up(self) -> None:
        """Ask a worker that exists to become warm."""
        self._spawn(self._prepare())

    def listen(self) -> None:
        self._spawn(self._listen())

    def watch(self, info: WorkerInfo) -> None:
        """Hear of the end of a warm worker from its port, too."""
        self._spawn(self._watch(info))

    def run(self, assignment: Assignment) -> None:
        """The one `run` call in flight."""
        self._spawn(self._run(assignment))

    def rejoin(self, generation: int) -> None:
        """Ask again for the answer of a `run` call that is lost."""
        self._spawn(self._join(generation))

    def interrupt(self, generation: int) -> None:
        self._spawn(self._interrupt(generation))

    def request_yield(self, generation: int, durable: bool) -> None:
        self._spawn(self._request_yield(generation, durable))

    def request_snapshot_parts(self) -> None:
        self._spawn(self._request_snapshot_parts())

    def leave(self) -> None:
        """Nothing that the worker may still answer matters any more."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def farewell(self) -> None:
        """The attempt is over: hear what the worker printed last."""
        if not self._fleet.knows(self.index):
            return
        with contextlib.suppress(RayError, TimeoutError):
            call = self._fleet.poll(self.index, self._heard, self._heard, 0.0)
            poll = await asyncio.wait_for(call, timeout=_FAREWELL_S)
            self._context.reporter.acknowledged(self.index, poll, self._context.state())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, avoid_nodes: tuple[str, ...], only_on: str) -> None:
        try:
            await self._fleet.start(self.index, self._worker_id, avoid_nodes, only_on)
        except RayError as error:
            self._lost(error, "start")
            return
        self.listen()
        await self._prepare()

    async def _prepare(self) -> None:
        while True:
            try:
                answer = await self._fleet.prepare(self.index)
                break
            except ActorUnavailableError as error:
                await self._unreachable(error)  # prepare is harmless to repeat
            except RayError as error:
                self._lost(error, "prepare call")
                return
        if isinstance(answer, ErrorReport):
            self._post(WorkerFailedToStart(self.index, answer))
        else:
            self.watch(answer)
            self._post(WorkerWarm(self.index, answer))

    async def _watch(self, info: WorkerInfo) -> None:
        gone = await liveness_probe.until_gone(
            (info.node_ip, info.store_port), partial(self._context.raylet, info.node_id)
        )
        if gone is None:
            return  # from here it cannot be reached
        if gone.with_raylet:
            message = f"the raylet of node {info.node_id[:12]} ({info.node_ip}) is gone, and worker {info.pid} with it"
            self._gone(IncidentCause.NODE_DIED, "port", message)
        else:
            self._gone(IncidentCause.WORKER_DIED, "port", f"worker {info.pid} at {info.node_ip} is gone")
        self._post(DeathDated(self._worker_id, gone.at))

    async def _run(self, assignment: Assignment) -> None:
        try:
            self._post(RunReturned(self.index, await self._fleet.run(self.index, assignment)))
        except ActorUnavailableError as error:
            await self._unreachable(error)
            await self._join(assignment.generation)
        except RayError as error:
            self._lost(error, "run call")

    async def _join(self, generation: int) -> None:
        """Unavailable is not dead, and a restarted supervisor has lost its calls: ask again for the answer."""
        while True:
            try:
                self._post(RunReturned(self.index, await self._fleet.join(self.index, generation)))
                return
            except ActorUnavailableError as error:
                await self._unreachable(error)
            except RayError as error:
                self._lost(error, "join call")
                return

    async def _listen(self) -> None:
        """Long-polls the worker for news, logs and progress, as long as it lives.

        The worker keeps what it told until the control plane has stored it: a supervisor that dies before loses
        nothing. What was stored, but not acknowledged yet, is told again: steps overwrite themselves, and some lines of
        the log are there twice.
        """
        receipts: deque[tuple[int, int]] = deque()
        """Of each answer: its number, and the outbox's once all of it was told there."""
        acknowledged = 0
        outbox = self._context.outbox
        wait_s = _POLL_WAIT_S
        while True:
            while receipts and receipts[0][1] <= outbox.acknowledged:
                acknowledged, _ = receipts.popleft()
            try:
                poll = await self._fleet.poll(self.index, self._heard, acknowledged, wait_s)
            except ActorUnavailableError as error:
                await self._unreachable(error)
                continue
            except RayError as error:
                self._lost(error, "poll call")  # the run call says so too, if there is one; who is first counts
                return
            self._heard = poll.seq
            wait_s = _POLL_CLOSELY_S if self._may_soon_hang(poll.progress) else _POLL_WAIT_S
            self._context.reporter.acknowledged(self.index, poll, self._context.state())
            for item in poll.reports:
                self._post(ReportArrived(self.index, item))
            self._post(Beat(self.index, poll.progress))
            await self._context.settled()
            if not receipts or receipts[-1][0] != poll.seq:
                receipts.append((poll.seq, outbox.seq))

    def _may_soon_hang(self, progress: Progress) -> bool:
        is_at_work = progress.phase not in (Phase.IDLE, Phase.PREPARING)
        return is_at_work and progress.stalled_s >= self._context.state().target.spec.health.hang_floor_s / 2

    async def _interrupt(self, generation: int) -> None:
        """Insist: what is not woken is killed soon."""
        while True:
            try:
                await self._fleet.interrupt(self.index, generation)
                self._post(InterruptAcknowledged(self.index, generation))
                return
            except ActorUnavailableError as error:
                await self._unreachable(error)
            except RayError as error:
                _log.info("an interrupt failed; the run call will say why", extra={"error": str(error)})
                return

    async def _request_yield(self, generation: int, durable: bool) -> None:
        while True:
            try:
                await self._fleet.request_yield(self.index, generation, durable)
                return
            except ActorUnavailableError as error:
                await self._unreachable(error)
            except RayError as error:
                _log.info("a request failed; the run call will say why", extra={"error": str(error)})
                return

    async def _request_snapshot_parts(self) -> None:
        while True:
            try:
                self._post(SnapshotPartsReported(self.index, await self._fleet.snapshot_parts(self.index)))
                return
            except ActorUnavailableError as error:
                await self._unreachable(error)
            except RayError as error:
                self._lost(error, "snapshot parts call")
                return

    async def _unreachable(self, error: RayError) -> None:
        """Ray re-connects, or calls the worker dead after its own health check; until then it is neither."""
        self._post(WorkerUnreachable(self.index, _first_line(error)))
        await asyncio.sleep(_RETRY_S)

    def _lost(self, error: RayError, witness: str) -> None:
        cause = cause_of(error) if isinstance(error, RayActorError) else IncidentCause.WORKER_DIED
        if isinstance(error, RayActorError) and (actor_id := self._fleet.actor_id(self.index)):
            self._context.spawn(self._date_death(actor_id))
        self._gone(cause, witness, _first_line(error))

    def _gone(self, cause: IncidentCause, witness: str, message: str) -> None:
        self.leave()
        self._context.kill(self.index)  # the witness may be wrong, and what it calls dead would live on with its memory
        self._post(WorkerLost(self.index, cause, witness, message))

    async def _date_death(self, actor_id: str) -> None:
        died_at = await gcs.died_at(actor_id)
        if died_at is not None:
            self._post(DeathDated(self._worker_id, died_at))


def _first_line(error: RayError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
