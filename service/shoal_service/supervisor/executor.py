"""Executor: feeds what happens to the attempt machine, and performs its commands. One asyncio loop in one thread.

worker answers, storage answers, directives, nodes, time  -->  queue  -->  step(state, event, now)
                                                                                     |
            clients (worker calls), coordinator (storage), outbox  <--  commands  ---+--> journal, written first

Made by the supervisor, which runs it on a thread of its own. It decides nothing, and reaches the world outside only
through the protocols in `World`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, assert_never

from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.commands import (
    Command,
    Commit,
    Emit,
    End,
    FindCheckpoint,
    ForgetDamaged,
    Interrupt,
    KillWorker,
    RequestSnapshotParts,
    RequestYield,
    Run,
    ShowIncident,
    StartWorker,
    SuspectNode,
)
from shoal_service.core.attempt.events import Event, ReportArrived, Tick, WorkerLost
from shoal_service.core.attempt.state.attempt import Attempt, essential
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.planner import plan
from shoal_service.supervisor.checkpoints.coordinator import CheckpointCoordinator
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.directives import avoided_nodes, changes
from shoal_service.supervisor.journal import JournalEntry
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.release import release_workers
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.supervisor.workers.worker_client import SupervisorContext, WorkerClient
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.worker_reports import ValidationReport

_log = logging.getLogger(__name__)
TICK_S = 0.25
_STEP_NOTE_S = 2.0
"""At least this often the journal contains the newest step, so that the number of lost steps is known if the supervisor
and all workers die together. No command follows from it, so the executor does not wait for that write."""


class Executor:
    """`run` returns at the attempt's end; `direct` may be called from any thread."""

    def __init__(
        self, config: SupervisorConfig, state: Attempt, entry: JournalEntry | None, outbox: Outbox, world: World
    ) -> None:
        """`state`: a new attempt's, or the one of `entry`, which is the journal's if the supervisor was restarted."""
        self._journal = world.journal
        self._fleet = world.fleet
        self._node_watch = world.node_watch
        self._clock = world.clock
        self._outbox = outbox
        self._reporter = Reporter(outbox, config, world.clock)
        self._coordinator = CheckpointCoordinator(config, world, self._reporter, self._post)
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._killing: set[asyncio.Task[None]] = set()
        self._clients: dict[int, WorkerClient] = {}
        self._to_release: list[WorkerClient] = []
        self._context = SupervisorContext(
            fleet=self._fleet,
            clock=world.clock,
            until_gone=world.until_gone,
            outbox=outbox,
            reporter=self._reporter,
            post=self._post,
            settled=self._queue.join,
            state=lambda: self._state,
            kill=self._kill,
            spawn=self._spawn,
            raylet=lambda node_id: self._nodes.raylets.get(node_id),
        )
        self._nodes = NodeTable()
        self._end: End | None = End(entry.end) if entry and entry.end else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._directive = entry.directive if entry else None
        self._is_restart = entry is not None
        self._state = state
        self._journaled_step, self._journaled_mono = state.progress.step, 0.0

    @property
    def generation(self) -> int:
        """The current one, or the last one; for the log."""
        return self._state.group.generation

    async def run(self) -> None:
        """Until the attempt has ended and everything that it started is released."""
        self._loop = asyncio.get_running_loop()
        self._node_watch.start(self._nodes_changed)
        if self._is_restart:
            self._reattach()
        else:
            self._perform(machine.open_attempt())
        self._reporter.show(self._state)
        while self._state.stage is not Stage.ENDED:
            try:
                event = await self._clock.wait_for(self._queue.get(), TICK_S)
            except TimeoutError:
                self._take(Tick())
                continue
            self._take(event)
            self._queue.task_done()
        self._node_watch.stop()
        await self._release_all()
        if self._end is not None:
            self._reporter.report([self._end], self._state)
            self._write_journal()

    def direct(self, directive: Directive) -> None:
        """From a Ray thread: what the control plane wants now."""
        self._call_on_loop(self._follow, directive)

    def _nodes_changed(self, nodes: NodeTable) -> None:
        """From the thread of the node watch."""
        self._call_on_loop(self._follow_nodes, nodes)

    def _call_on_loop(self, function: Any, argument: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the attempt is over
                self._loop.call_soon_threadsafe(function, argument)

    def _follow(self, directive: Directive) -> None:
        if directive == self._directive:
            return
        self._directive = directive
        self._reporter.spec_version = directive.spec_version
        for event in changes(self._state, directive):
            self._post(event)
        self._avoid()

    def _follow_nodes(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        for worker in self._state.pool.workers:
            if worker.info is not None and worker.info.node_id in nodes.dead:
                self._detach(worker.index)
                self._fleet.forget(worker.index)
                message = f"node {worker.info.node_id[:12]} ({worker.info.node_ip}) has died"
                self._post(WorkerLost(worker.index, IncidentCause.NODE_DIED, "node watch", message))
        self._avoid()

    def _avoid(self) -> None:
        event = avoided_nodes(self._state, self._directive, self._nodes)
        if event is not None:
            self._post(event)

    def _post(self, event: Event) -> None:
        self._queue.put_nowait(event)

    def _take(self, event: Event) -> None:
        before = self._state
        if isinstance(event, ReportArrived):
            self._reporter.record_report(event.item, before)
        self._state, commands = machine.step(before, event, self._clock.time(), plan)
        self._end = next((c for c in commands if isinstance(c, End)), None)
        for command in commands:
            if isinstance(command, (Emit, ShowIncident)):
                self._reporter.report([command], self._state)
            elif isinstance(command, SuspectNode):
                self._reporter.suspect(command)
        is_validation = isinstance(event, ReportArrived) and isinstance(event.item, ValidationReport)
        if commands or is_validation or essential(before) != essential(self._state):
            self._write_journal()
        elif (
            self._state.progress.step != self._journaled_step
            and self._clock.monotonic() - self._journaled_mono > _STEP_NOTE_S
        ):
            self._write_journal(wait=False)
        self._perform(commands)
        self._reporter.show(self._state)

    def _write_journal(self, *, wait: bool = True) -> None:
        seq, unacknowledged, _ = self._outbox.unacknowledged()
        end = self._end.end if self._end else None
        entry = JournalEntry(
            state=self._state, seq=seq, unacknowledged=unacknowledged, end=end, directive=self._directive
        )
        self._journal.write(entry, wait=wait)
        self._journaled_step, self._journaled_mono = self._state.progress.step, self._clock.monotonic()

    def _perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._perform_one(command)

    def _perform_one(self, command: Command) -> None:
        match command:
            case StartWorker(index, worker_id, avoid_nodes, only_on):
                self._clients[index] = WorkerClient(index, worker_id, self._context)
                self._clients[index].start(avoid_nodes, only_on)
            case KillWorker(index, reason):
                _log.info("worker.kill", extra={"worker": self._worker_id(index), "reason": reason})
                self._kill(index)
            case Run(index, assignment):
                if client := self._client(index):
                    client.run(assignment)
            case Interrupt(index, generation):
                if client := self._client(index):
                    client.interrupt(generation)
            case RequestYield(index, generation, durable):
                if client := self._client(index):
                    client.request_yield(generation, durable)
            case RequestSnapshotParts(index):
                if client := self._client(index):
                    client.request_snapshot_parts()
            case FindCheckpoint(excluding):
                self._spawn(self._coordinator.find(excluding))
            case Commit(name, parts):
                self._spawn(self._coordinator.commit(name, parts, self._state))
            case ForgetDamaged(name, message):
                self._spawn(self._coordinator.show_damaged(name, message))
            case Emit() | ShowIncident() | SuspectNode() | End():
                pass  # reported before the journal was written
            case _:
                assert_never(command)

    def _worker_id(self, index: int) -> str:
        worker = self._state.pool.worker(index)
        return worker.worker_id if worker is not None else str(index)

    def _client(self, index: int) -> WorkerClient | None:
        """None: the worker has ended, and the event of its loss is in the queue."""
        return self._clients.get(index) if self._fleet.knows(index) else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _detach(self, index: int) -> WorkerClient | None:
        client = self._clients.pop(index, None)
        if client is not None:
            client.close()
        return client

    def _kill(self, index: int) -> None:
        client = self._detach(index)
        if self._state.stage is Stage.ENDED and client is not None:
            self._to_release.append(client)  # its last reports are collected first, see `_release_all`
            return
        task = asyncio.get_running_loop().create_task(self._fleet.kill(index))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _release_all(self) -> None:
        await release_workers(self._fleet, self._clock, self._to_release, self._killing)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._coordinator.remove_torn(self._state)

    def _reattach(self) -> None:
        """After a restart of the supervisor: finds the workers by name. None of them is stopped."""
        workers = self._state.pool.workers
        dead = self._node_watch.dead_nodes()
        found = {w.index for w in workers if self._fleet.find(w.index, w.worker_id, w.info)}
        restarted = Emit(SupervisorRestarted(found=len(found), of=len(workers)))
        self._reporter.report([restarted], self._state)
        for worker in workers:
            if worker.index not in found:
                by_node = worker.info is not None and worker.info.node_id in dead
                cause = IncidentCause.NODE_DIED if by_node else IncidentCause.WORKER_DIED
                message = "the worker was gone when the supervisor was restarted"
                self._post(WorkerLost(worker.index, cause, "name lookup", message))
                continue
            client = self._clients[worker.index] = WorkerClient(worker.index, worker.worker_id, self._context)
            client.start_polling()
            if worker.info is not None:
                client.probe(worker.info)
            if worker.in_run:
                client.rejoin(self._state.group.generation)
            elif not worker.warm:
                client.prepare()
        self._perform(machine.reopen(self._state))
