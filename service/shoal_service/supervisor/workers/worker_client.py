"""WorkerClient: all calls to one worker; their answers, and their failures, become events of the attempt machine.

One client per worker, made and called by the executor. It holds no state of the attempt and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from shoal_service.core.attempt.commands import CompareModels, RequestSnapshotParts, StartWorker
from shoal_service.core.attempt.events import (
    DeathDated,
    DeathExplained,
    InterruptAcknowledged,
    ModelsCompared,
    RunReturned,
    SnapshotPartsReported,
    WorkerFailedToStart,
    WorkerLost,
    WorkerWarm,
)
from shoal_service.supervisor.protocols import WorkerCallError, WorkerDied, WorkerUnavailable
from shoal_service.supervisor.workers.context import SupervisorContext, unreachable
from shoal_service.supervisor.workers.polling.worker_polling import WorkerPolling
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Assignment, ErrorReport, WorkerExit, WorkerInfo
from shoal_workers.contract.model.shape import difference

T = TypeVar("T")
_log = logging.getLogger(__name__)
_EXPLAIN_AFTER_S = (0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 5.0, 10.0)
"""Waiting times before each question for the exit status of a lost worker."""


class WorkerClient:
    """Called on the executor's loop only. All public methods but `collect_last_reports` return immediately."""

    def __init__(self, index: int, worker_id: str, context: SupervisorContext) -> None:
        self.index = index
        self._worker_id = worker_id
        self._context = context
        self._fleet = context.fleet
        self._post = context.post
        self._tasks: set[asyncio.Task[None]] = set()
        self._adopted: asyncio.Task[None] | None = None
        """Other calls wait for it; None: this supervisor has started the worker."""
        self._info: WorkerInfo | None = None
        """Set once it is warm."""
        self._is_in_run = False
        self._polling = WorkerPolling(index, worker_id, context)

    def start(self, order: StartWorker) -> None:
        """Start the worker and make it warm."""
        self._spawn(self._start(order))

    def adopt(self, generation: int) -> None:
        """After a restart of the supervisor, first of all: the worker obeys this one, and leaves every generation later
        than this one."""
        self._adopted = asyncio.get_running_loop().create_task(self._adopt(generation))
        self._tasks.add(self._adopted)
        self._adopted.add_done_callback(self._tasks.discard)

    def prepare(self) -> None:
        """Make a worker warm that was started before."""
        self._spawn(self._prepare())

    def start_polling(self) -> None:
        self._spawn(self._poll())

    def probe(self, info: WorkerInfo) -> None:
        """Also detect the end of a warm worker by its port."""
        self._info = info
        self._polling.node_id = info.node_id
        self._spawn(self._probe(info))

    def run(self, assignment: Assignment) -> None:
        """Start the one `run` call that a worker has in flight."""
        self._is_in_run = True
        self._spawn(self._run(assignment))

    def rejoin(self, generation: int) -> None:
        """Wait for the result of a `run` call that a previous supervisor made."""
        self._is_in_run = True
        self._spawn(self._join(generation))

    def interrupt(self, generation: int) -> None:
        self._spawn(self._interrupt(generation))

    def request_yield(self, generation: int, durable: bool) -> None:
        self._spawn(self._request_yield(generation, durable))

    def note_commit(self, generation: int, step: int, error: str) -> None:
        self._spawn(self._note_commit(generation, step, error))

    def ask(self, order: RequestSnapshotParts | CompareModels) -> None:
        match order:
            case RequestSnapshotParts():
                self._spawn(self._request_snapshot_parts())
            case CompareModels(trained=trained):
                self._spawn(self._compare_models(trained))

    @property
    def is_idle(self) -> bool:
        """It is warm and not in `run`, so it creates no snapshots."""
        return self._info is not None and not self._is_in_run

    def close(self) -> None:
        """Cancel all calls: no answer of this worker is needed any more."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def collect_last_reports(self, limit_s: float) -> None:
        """At the attempt's end: one more poll, for the worker's last reports and output; `limit_s` for the answer."""
        if self._fleet.knows(self.index):
            await self._polling.collect_last(limit_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        waiting = work if self._adopted is None else self._after_adoption(work)
        task = asyncio.get_running_loop().create_task(waiting)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _after_adoption(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            assert self._adopted is not None
            await asyncio.wait({self._adopted})
            await work
        finally:
            work.close()

    async def _adopt(self, generation: int) -> None:
        with contextlib.suppress(WorkerCallError):  # its other calls fail too, and their errors are reported
            await self._insist(lambda: self._fleet.adopt(self.index, generation))

    async def _start(self, order: StartWorker) -> None:
        try:
            await self._fleet.start(order)
        except WorkerCallError as error:
            self._lost(error, "start")
            return
        self.start_polling()
        await self._prepare()

    async def _prepare(self) -> None:
        try:
            answer = await self._insist(lambda: self._fleet.prepare(self.index))
        except WorkerCallError as error:
            self._lost(error, "prepare call")
            return
        if isinstance(answer, ErrorReport):
            self._post(WorkerFailedToStart(self.index, answer))
        else:
            self.probe(answer)
            self._post(WorkerWarm(self.index, answer))

    async def _probe(self, info: WorkerInfo) -> None:
        address = (info.node_ip, info.store_port)
        gone = await self._context.until_gone(address, partial(self._context.raylet, info.node_id))
        if gone is None:
            return  # the port cannot be reached from here
        if gone.with_raylet:
            message = f"the raylet of node {info.node_id[:12]} ({info.node_ip}) died, and its workers with it"
            self._gone(IncidentCause.NODE_DIED, "port", message)
        else:
            self._gone(IncidentCause.WORKER_DIED, "port", "the worker's process ended")
        self._post(DeathDated(self._worker_id, gone.at))

    async def _run(self, assignment: Assignment) -> None:
        try:
            self._returned(await self._fleet.run(self.index, assignment))
        except WorkerUnavailable:
            await unreachable(self._context, self.index)
            await self._join(assignment.generation)
        except WorkerCallError as error:
            self._lost(error, "run call")

    async def _join(self, generation: int) -> None:
        """For the result of a `run` call whose answer was lost: by a broken connection, or with a previous
        supervisor."""
        try:
            worker_exit = await self._insist(lambda: self._fleet.join(self.index, generation))
        except WorkerCallError as error:
            self._lost(error, "join call")
            return
        self._returned(worker_exit)

    def _returned(self, worker_exit: WorkerExit) -> None:
        self._is_in_run = False
        self._post(RunReturned(self.index, worker_exit))

    async def _poll(self) -> None:
        try:
            await self._polling.run()
        except WorkerCallError as error:
            self._lost(error, "poll call")  # the `run` call, if there is one, fails too; the first one counts

    async def _interrupt(self, generation: int) -> None:
        """Repeated until it is acknowledged: a worker that does not acknowledge it is killed soon."""
        try:
            await self._insist(lambda: self._fleet.interrupt(self.index, generation))
        except WorkerCallError as error:
            # not an event of the machine: the `run` call of this worker fails too, and its error is reported
            _log.info("worker.interrupt_failed", extra=self._failure(error))
            return
        self._post(InterruptAcknowledged(self.index, generation))

    async def _request_yield(self, generation: int, durable: bool) -> None:
        try:
            await self._insist(lambda: self._fleet.request_yield(self.index, generation, durable))
        except WorkerCallError as error:
            _log.info("worker.yield_request_failed", extra=self._failure(error))

    async def _note_commit(self, generation: int, step: int, error: str) -> None:
        try:
            await self._insist(lambda: self._fleet.note_commit(self.index, generation, step, error))
        except WorkerCallError as failed:
            _log.info("worker.commit_note_failed", extra=self._failure(failed))

    async def _request_snapshot_parts(self) -> None:
        try:
            snapshot_parts = await self._insist(lambda: self._fleet.snapshot_parts(self.index))
        except WorkerCallError as error:
            self._lost(error, "snapshot parts call")
            return
        self._post(SnapshotPartsReported(self.index, snapshot_parts))

    async def _compare_models(self, trained: int) -> None:
        try:
            theirs = await self._insist(lambda: self._fleet.model_shape(trained))
            mine = await self._insist(lambda: self._fleet.build_model(self.index))
        except WorkerCallError as error:
            _log.info("worker.comparison_failed", extra=self._failure(error))
            self._post(ModelsCompared(self.index, f"the models could not be compared: {error}"))
            return
        if isinstance(mine, ErrorReport):
            words = f"it cannot build its model: {mine.sentence}"
        else:
            words = difference(theirs, mine) if theirs is not None else "the model that trains is not known"
        self._post(ModelsCompared(self.index, words))

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats a call, which must be idempotent, while the worker is unavailable."""
        while True:
            try:
                return await call()
            except WorkerUnavailable:
                await unreachable(self._context, self.index)

    def _failure(self, error: WorkerCallError) -> dict[str, object]:
        """Fields of a log event."""
        return {"worker": self._worker_id, "error": str(error)}

    def _lost(self, error: WorkerCallError, witness: str) -> None:
        if isinstance(error, WorkerDied) and (actor_id := self._fleet.actor_id(self.index)):
            self._context.spawn(self._date_death(actor_id))
        self._gone(error.cause, witness, str(error))

    def _gone(self, cause: IncidentCause, witness: str, message: str) -> None:
        if self._info is not None and cause is IncidentCause.WORKER_DIED:
            message = f"{message}: {_process(self._info)}"
            self._context.spawn(self._explain_death(self._info))
        self.close()
        self._context.kill(self.index)  # the witness may be wrong: a worker that is still alive must not stay
        self._post(WorkerLost(self.index, cause, witness, message))

    async def _explain_death(self, info: WorkerInfo) -> None:
        """The node's fork server writes it down when it reaps the process. If no other worker is on the node, one may
        start there soon."""
        for wait_s in _EXPLAIN_AFTER_S:
            await self._context.clock.sleep(wait_s)
            words = await self._fleet.exit_words(info)
            if words is not None:
                self._post(DeathExplained(self._worker_id, f"{_process(info)} {words}"))
                return

    async def _date_death(self, actor_id: str) -> None:
        died_at = await self._fleet.died_at(actor_id)
        if died_at is not None:
            self._post(DeathDated(self._worker_id, died_at))


def _process(info: WorkerInfo) -> str:
    return f"process {info.pid} on {info.node_ip}"
