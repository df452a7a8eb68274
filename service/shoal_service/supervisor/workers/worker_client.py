"""WorkerClient: all calls to one worker; their answers, and their failures, become events of the attempt machine.

One client per worker, made and called by the executor. It holds no state of the attempt and decides nothing. Hidden
here: how a call is repeated while the worker is unavailable, who dates and explains its death, and in WorkerPolling how
its reports are received and acknowledged. While the agent of the worker's node polls it (`agent_pool`), WorkerPolling
only keeps the positions. SupervisorContext is what all clients of an attempt share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from shoal_service.clock import Clock
from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.messages import (
    CompareModels,
    DeathDated,
    DeathExplained,
    Event,
    Interrupt,
    InterruptAcknowledged,
    ModelsCompared,
    NoteCommit,
    ProgressReported,
    ReportArrived,
    RequestSnapshotParts,
    RequestYield,
    Run,
    RunReturned,
    SnapshotPartsReported,
    StartWorker,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
)
from shoal_service.core.attempt.state import Attempt, Worker, poll_wait_s
from shoal_service.supervisor.protocols import Fleet, UntilGone, WorkerCallError, WorkerDied, WorkerUnavailable
from shoal_service.supervisor.reporting.reporter import Outbox, Reporter
from shoal_workers.contract import (
    Assignment,
    ErrorReport,
    IncidentCause,
    Phase,
    PollRequest,
    Progress,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
    difference,
)

T = TypeVar("T")
WorkerOrder = Run | Interrupt | RequestYield | NoteCommit | RequestSnapshotParts | CompareModels
_log = logging.getLogger(__name__)
_EXPLAIN_AFTER_S = (0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 5.0, 10.0)
"""Waiting times before each question for the exit status of a lost worker."""


class WorkerClient:
    """Makes all calls to one worker. Called on the executor's loop only. All public methods but `collect_last_reports`
    return immediately."""

    def __init__(self, index: int, worker_id: str, context: SupervisorContext) -> None:
        self.index = index
        self._worker_id = worker_id
        self._context = context
        self._fleet = context.fleet
        self._post = context.post
        self._tasks: set[asyncio.Task[Any]] = set()
        self._adopted: asyncio.Task[None] | None = None
        """The call that adopts the worker, for which other calls wait; None if this supervisor has started the
        worker."""
        self._info: WorkerInfo | None = None
        """What the worker said of itself; set once it is warm."""
        self._is_in_run = False
        self._polling = WorkerPolling(index, worker_id, context)

    def start(self, order: StartWorker) -> None:
        """Starts the worker and makes it warm."""
        self._spawn("start", lambda: self._start(order))

    def take_over(self, worker: Worker, generation: int, *, is_to_run: bool) -> None:
        """Take over a worker of a previous supervisor. It then obeys this one, and leaves every later generation.

        Args:
            generation: the newest in the journal.
            is_to_run: its `run` call is repeated.
        """
        self._adopted = self._spawn("adopt call", lambda: self._adopt(generation))
        self._spawn("poll call", self._polling.run)
        if worker.info is not None:
            self._probe_port(worker.info)
        if worker.in_run and not is_to_run:
            self._rejoin(generation)
        elif worker.left_out is not None and worker.left_out.generation is not None:
            self._rejoin(worker.left_out.generation)
        elif not worker.warm:
            self._spawn("prepare call", self._prepare)

    def _probe_port(self, info: WorkerInfo) -> None:
        """Watches the port of a warm worker too, to detect its end."""
        self._info = info
        self._polling.node_id = info.node_id
        self._spawn("port", lambda: self._probe(info))

    def perform(self, order: WorkerOrder) -> None:
        """Carries out an order of the machine. What comes of it is an event."""
        match order:
            case Run(assignment=assignment):
                self._is_in_run = True
                self._spawn("run call", lambda: self._run(assignment))
            case Interrupt(index, generation):
                # repeated until it is acknowledged; a failure is no event, since the `run` call fails too
                call = partial(self._fleet.interrupt, index, generation)
                done = InterruptAcknowledged(index, generation)
                self._spawn("interrupt", lambda: self._tell("interrupt", call, done))
            case RequestYield(index, generation, durable):
                call = partial(self._fleet.request_yield, index, generation, durable)
                self._spawn("request_yield", lambda: self._tell("request_yield", call))
            case NoteCommit(index, generation, step, error):
                call = partial(self._fleet.note_commit, index, generation, step, error)
                self._spawn("note_commit", lambda: self._tell("note_commit", call))
            case RequestSnapshotParts():
                self._spawn("snapshot parts call", self._request_snapshot_parts)
            case CompareModels(trained=trained):
                self._spawn("comparison", lambda: self._compare_models(trained))

    def _rejoin(self, generation: int) -> None:
        """Waits for the result of a `run` call that a previous supervisor made."""
        self._is_in_run = True
        self._spawn("join call", lambda: self._join(generation))

    @property
    def is_idle(self) -> bool:
        """True if the worker is warm and not in `run`, so that it creates no snapshots."""
        return self._info is not None and not self._is_in_run

    def close(self) -> None:
        """Cancels all calls, because no answer of this worker is needed any more."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def collect_last_reports(self, limit_s: float) -> None:
        """Polls once more at the attempt's end, for the worker's last reports and output. `limit_s`: for the answer."""
        if self._fleet.knows(self.index):
            await self._polling.collect_last(limit_s)

    def _spawn(self, witness: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Begin work with the worker, once it is adopted. `witness`: names the work if one of its calls shows that the
        worker is lost. Several may fail; the first one counts."""
        task = asyncio.get_running_loop().create_task(self._carry_out(witness, work, self._adopted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry_out(
        self, witness: str, work: Callable[[], Awaitable[None]], adopted: asyncio.Task[None] | None
    ) -> None:
        try:
            if adopted is not None:
                await asyncio.wait({adopted})
            await work()
        except WorkerCallError as error:
            if isinstance(error, WorkerDied) and (actor_id := self._fleet.actor_id(self.index)):
                self._context.spawn(self._date_death(actor_id))
            self._post_loss(error.cause, witness, str(error))

    async def _adopt(self, generation: int) -> None:
        with contextlib.suppress(WorkerCallError):  # its other calls fail too, and their errors are reported
            await self._retry_until_reachable(lambda: self._fleet.adopt(self.index, generation))

    async def _start(self, order: StartWorker) -> None:
        await self._fleet.start(order)
        self._spawn("poll call", self._polling.run)
        self._spawn("prepare call", self._prepare)

    async def _prepare(self) -> None:
        answer = await self._retry_until_reachable(lambda: self._fleet.prepare(self.index))
        if isinstance(answer, ErrorReport):
            self._post(WorkerFailedToStart(self.index, answer))
        else:
            self._probe_port(answer)
            self._post(WorkerWarm(self.index, answer))

    async def _probe(self, info: WorkerInfo) -> None:
        address = (info.node_ip, info.store_port)
        gone = await self._context.until_gone(address, partial(self._context.raylet, info.node_id))
        if gone is None:
            return  # the port cannot be reached from here
        if gone.with_raylet:
            message = f"the raylet of node {info.node_id[:12]} ({info.node_ip}) died, and its workers with it"
            self._post_loss(IncidentCause.NODE_DIED, "port", message)
        else:
            self._post_loss(IncidentCause.WORKER_DIED, "port", "the worker's process ended")
        self._post(DeathDated(self._worker_id, gone.at))

    async def _run(self, assignment: Assignment) -> None:
        try:
            self._post_return(await self._fleet.run(self.index, assignment))
        except WorkerUnavailable:
            await unreachable(self._context, self.index)
            self._rejoin(assignment.generation)

    async def _join(self, generation: int) -> None:
        """Waits for the result of a `run` call whose answer was lost, by a broken connection or with a previous
        supervisor."""
        self._post_return(await self._retry_until_reachable(lambda: self._fleet.join(self.index, generation)))

    def _post_return(self, worker_exit: WorkerExit) -> None:
        self._is_in_run = False
        self._post(RunReturned(self.index, worker_exit))

    async def _tell(self, name: str, call: Callable[[], Awaitable[None]], done: Event | None = None) -> None:
        """Makes a call without an answer. If it fails, that is logged.

        Args:
            name: of the call, for the log.
            done: posted once the call has succeeded; None if nobody needs to know.
        """
        try:
            await self._retry_until_reachable(call)
        except WorkerCallError as error:
            _log.info("worker.call_failed", extra={"call": name, **self._make_failure_fields(error)})
        else:
            if done is not None:
                self._post(done)

    async def _request_snapshot_parts(self) -> None:
        snapshot_parts = await self._retry_until_reachable(lambda: self._fleet.snapshot_parts(self.index))
        self._post(SnapshotPartsReported(self.index, snapshot_parts))

    async def _compare_models(self, trained: int) -> None:
        try:
            theirs = await self._retry_until_reachable(lambda: self._fleet.model_shape(trained))
            mine = await self._retry_until_reachable(lambda: self._fleet.build_model(self.index))
        except WorkerCallError as error:
            _log.info("worker.comparison_failed", extra=self._make_failure_fields(error))
            self._post(ModelsCompared(self.index, f"the models could not be compared: {error}"))
            return
        if isinstance(mine, ErrorReport):
            message = f"it cannot build its model: {mine.sentence}"
        else:
            message = difference(theirs, mine) if theirs is not None else "the model that trains is not known"
        self._post(ModelsCompared(self.index, message))

    async def _retry_until_reachable(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats a call, which must be idempotent, while the worker is unavailable."""
        while True:
            try:
                return await call()
            except WorkerUnavailable:
                await unreachable(self._context, self.index)

    def _make_failure_fields(self, error: WorkerCallError) -> dict[str, object]:
        """The fields of a log event about a failed call."""
        return {"worker": self._worker_id, "error": str(error)}

    def _post_loss(self, cause: IncidentCause, witness: str, message: str) -> None:
        if self._info is not None and cause is IncidentCause.WORKER_DIED:
            message = f"{message}: {_process(self._info)}"
            self._context.spawn(self._explain_death(self._info))
        self.close()
        self._context.kill(self.index)  # the witness may be wrong: a worker that is still alive must not stay
        self._post(WorkerLost(self.index, cause, witness, message))

    async def _explain_death(self, info: WorkerInfo) -> None:
        """Asks for the exit status, which the node's fork server writes down when it reaps the process. If no other
        worker is on the node, one may start there soon."""
        for wait_s in _EXPLAIN_AFTER_S:
            await self._context.clock.sleep(wait_s)
            message = await self._fleet.exit_words(info)
            if message is not None:
                self._post(DeathExplained(self._worker_id, f"{_process(info)} {message}"))
                return

    async def _date_death(self, actor_id: str) -> None:
        died_at = await self._fleet.died_at(actor_id)
        if died_at is not None:
            self._post(DeathDated(self._worker_id, died_at))


def _process(info: WorkerInfo) -> str:
    return f"process {info.pid} on {info.node_ip}"


_HANG_POLL_WAIT_S = 0.25
"""How long a poll waits once the worker's progress counter has stood still for half of the hang limit."""


class WorkerPolling:
    """Polls one worker. Used on the executor's loop only."""

    def __init__(self, index: int, worker_id: str, context: SupervisorContext) -> None:
        self.index = index
        self.worker_id = worker_id
        self.node_id = ""
        """Set once the worker is warm."""
        self._context = context
        self._received_seq = 0
        """Number of the last report or log line that was received."""
        self._acknowledged = 0
        self._stored_after: deque[tuple[int, int, int]] = deque()
        """For each poll: its number, and the numbers of the outbox and of the metrics hook once all of it was in
        them."""
        self._wait_s = self._poll_wait_s()
        self._call: asyncio.Future[WorkerPoll] | None = None
        """The direct poll in flight; None if there is none."""
        self._released: asyncio.Future[None] | None = None
        """Set while an agent polls the worker; done when it is polled directly again."""
        self._has_failed = False
        """True if its agent could not poll the worker, and it has not answered a direct poll since."""

    async def run(self) -> None:
        """Long-polls the worker for reports, logs and progress. Raises WorkerCallError when the worker has ended.

        The worker keeps a report until the control plane has stored it and the metrics hook has logged it, so nothing
        is lost if the supervisor dies before. What was stored and not acknowledged yet is reported again: steps
        overwrite themselves, and some log lines appear twice.
        """
        polled = self._context.polled
        polled[self.index] = self
        try:
            while True:
                try:
                    poll = await self._poll_directly()
                except WorkerUnavailable:
                    await unreachable(self._context, self.index)
                    continue
                if poll is not None:
                    self._has_failed = False
                    self.receive(poll)
                    await self._context.settled()
                    self.handled()
        finally:
            if polled.get(self.index) is self:
                del polled[self.index]

    async def _poll_directly(self) -> WorkerPoll | None:
        """Polls once. None if an agent has polled the worker meanwhile, and does so no longer."""
        request = self.request()
        fleet = self._context.fleet
        call = self._call = asyncio.ensure_future(
            fleet.poll(self.index, request.after, request.acknowledged, request.wait_s)
        )
        try:
            await asyncio.wait({call})
            if self._released is None:
                return call.result()
            await self._released
            self._wait_s = 0.0  # its last answer may be old
            return None
        finally:
            call.cancel()
            self._call = self._released = None

    def take_over(self) -> bool:
        """Lets an agent poll the worker from now on, until `release`. False: not now, because an answer is being
        handled, or the last try has failed."""
        if self._released is not None:
            return not self._released.done()
        if self._call is None or self._call.done() or self._has_failed:
            return False
        self._released = asyncio.get_running_loop().create_future()
        self._call.cancel()
        return True

    @property
    def is_taken_over(self) -> bool:
        return self._released is not None and not self._released.done()

    def fail(self) -> None:
        """Goes back to direct polls, because the agent cannot poll the worker. A direct poll says why. No agent gets
        the worker until it has answered one."""
        self._has_failed = True
        self.release()

    def release(self) -> None:
        """Polls directly again, at once. Nothing happens if no agent polls the worker."""
        if self._released is not None and not self._released.done():
            self._released.set_result(None)

    def request(self) -> PollRequest:
        """Makes the next poll."""
        outbox, backlog = self._context.outbox, self._context.reporter.backlog
        stored = self._stored_after
        while stored and stored[0][1] <= outbox.acknowledged and stored[0][2] <= backlog.settled:
            self._acknowledged, *_ = stored.popleft()
        return PollRequest(
            worker_id=self.worker_id, after=self._received_seq, acknowledged=self._acknowledged, wait_s=self._wait_s
        )

    def receive(self, poll: WorkerPoll) -> None:
        """Turns an answer into events of the machine."""
        self._record(poll)
        self._wait_s = _HANG_POLL_WAIT_S if self._may_hang_soon(poll.progress) else self._poll_wait_s()
        for item in poll.reports:
            self._context.post(ReportArrived(self.index, item))
        self._context.post(ProgressReported(self.index, poll.progress))

    def handled(self) -> None:
        """Notes that the machine has handled the last answer, so all of it is in the outbox."""
        outbox, backlog = self._context.outbox, self._context.reporter.backlog
        if not self._stored_after or self._stored_after[-1][0] != self._received_seq:
            self._stored_after.append((self._received_seq, outbox.seq, backlog.added))

    async def collect_last(self, limit_s: float) -> None:
        """Polls once more at the attempt's end, for the worker's last reports and output."""
        with contextlib.suppress(WorkerCallError, TimeoutError):
            call = self._context.fleet.poll(self.index, self._received_seq, self._received_seq, 0.0)
            poll = await self._context.clock.wait_for(call, limit_s)
            self._record(poll)
            for item in poll.reports:
                self._context.reporter.record_report(item, self._context.state())

    def _record(self, poll: WorkerPoll) -> None:
        self._received_seq = poll.seq
        self._context.reporter.record_poll(self.index, poll, self._context.state())

    def _poll_wait_s(self) -> float:
        """How long a poll may wait. It returns as soon as the worker has something to report."""
        return poll_wait_s(len(self._context.state().pool.workers))

    def _may_hang_soon(self, progress: Progress) -> bool:
        if progress.phase in (Phase.IDLE, Phase.PREPARING):
            return False
        state = self._context.state()
        at_least = state.target.spec.health.hang_floor_s / 2  # the threshold itself takes a look at every rank
        return progress.stalled_s >= at_least and progress.stalled_s >= hangs.threshold_s(state) / 2


_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class SupervisorContext:
    """What all worker clients and inspections of an attempt share. Made by the executor."""

    fleet: Fleet
    clock: Clock
    until_gone: UntilGone
    outbox: Outbox
    reporter: Reporter
    post: Callable[[Event], None]
    settled: Callable[[], Awaitable[None]]
    """Waits until the machine has handled everything that was posted."""
    state: Callable[[], Attempt]
    kill: Callable[[int], None]
    """Ends the worker of this index."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs work on the executor's loop until the attempt ends, also after the client was closed."""
    raylet: Callable[[str], tuple[str, int] | None]
    """Address and port of a node's raylet, by node id; None means unknown."""
    polled: dict[int, WorkerPolling] = field(default_factory=dict)
    """All workers that are polled now, by index: each adds and removes itself. The pool of agents takes them over."""


async def unreachable(context: SupervisorContext, index: int) -> None:
    """Reports that a call to the worker has failed and may succeed later, and waits until it is due again."""
    context.post(WorkerUnreachable(index))
    await context.clock.sleep(_RETRY_S)
