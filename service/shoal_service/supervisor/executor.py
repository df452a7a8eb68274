"""Executor: feeds what happens to the attempt machine, and performs its commands. One asyncio loop in one thread.

    worker answers, storage answers, directives, nodes, time  -->  queue  -->  step_all(state, events, now)
                                                                                         |
                clients (worker calls), coordinator (storage), outbox  <--  commands  ---+--> journal, written first

All events that wait in the queue are one turn, so a turn costs the same whether one worker or a thousand have answered.
Hidden here: that an order is in the journal before it is performed, and is performed again after a restart; what a
directive changes for an attempt; how the workers of a predecessor are taken over, and how all are released at the end.
Made by the supervisor, which runs it on a thread of its own. It decides nothing, and reaches the world outside only
through the protocols in `World`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, assert_never

from shoal_service.clock import Clock, WallClockWatch, cancel_all
from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import (
    ClockJumped,
    Command,
    Commit,
    CompareModels,
    Emit,
    End,
    Event,
    FindCheckpoint,
    ForgetDamaged,
    Interrupt,
    KillWorker,
    NodesAvoided,
    NodesSilent,
    NoteCommit,
    Reopened,
    ReportArrived,
    RequestSnapshotParts,
    RequestYield,
    Run,
    ShowIncident,
    StartWorker,
    SuspectNode,
    Tick,
    WorkerLost,
)
from shoal_service.core.attempt.state import Attempt, AvoidedNode, Stage, Worker, essential, later_s, silent_nodes
from shoal_service.core.events import SupervisorRestarted
from shoal_service.planner import plan
from shoal_service.supervisor.checkpoints import CheckpointCoordinator
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.inspection import Inspection
from shoal_service.supervisor.journal import NO_ORDER, JournalEntry, UnansweredOrders
from shoal_service.supervisor.protocols import Fleet, WorkerCallError, World
from shoal_service.supervisor.reporting.reporter import Outbox, Reporter
from shoal_service.supervisor.workers.agent_pool import AgentPool
from shoal_service.supervisor.workers.worker_client import SupervisorContext, WorkerClient
from shoal_workers.contract import WIRE_VERSION, IncidentCause, ValidationReport, worker_name

T = TypeVar("T")
_log = logging.getLogger(__name__)
TICK_S = 0.25
_FORGET_S = 2.0
_KEEP_FILES_S = 1800.0
"""Longest time for the outputs of a node at the end of an attempt; a worker gives up a storage that takes nothing."""
_LAST_POLL_S = 5.0
_CHEAP_S = 0.005
_SHARE = 0.1
"""Most of the time, as a share, that paced work may take."""
_MAX_EVENTS = 512
"""Most events of one turn, so that the exits of a large group are several turns. Between two of them the loop answers
calls."""
_STEP_NOTE_S = 2.0
"""Seconds after which the journal gets the newest step, even if nothing else has changed: the lost steps are known if
all processes die together."""


class Executor:
    """Runs the attempt machine. `run` returns at the attempt's end; `direct` may be called from any thread."""

    def __init__(
        self, config: SupervisorConfig, state: Attempt, entry: JournalEntry | None, outbox: Outbox, world: World
    ) -> None:
        """`entry`: the newest entry of the journal if the supervisor was restarted; None if the attempt is new.
        `state`: that of the entry, or that of the new attempt."""
        self._world = world
        self._fleet = world.fleet
        self._clock = world.clock
        self._wall_clock = WallClockWatch(world.clock)
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
        self.inspection = Inspection(config, self._context)
        self._agent_pool = AgentPool(world.agents, self._context, config.agents_from)
        self._nodes = NodeTable()
        self._end: End | None = End(entry.end) if entry and entry.end else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._directive = entry.directive if entry else None
        self._is_restart, self._entry_version = entry is not None, entry.version if entry else WIRE_VERSION
        self._state, self._orders = state, UnansweredOrders(entry)
        self._journaled_step, self._journaled_mono = state.progress.step, 0.0
        self._is_unwritten = False
        """True if something essential has happened since the last entry was written. No command has followed from it,
        else an entry would have been written."""
        self._journal_pace, self._status_pace = Pace(world.clock), Pace(world.clock)

    @property
    def generation(self) -> int:
        """The current generation, or the last one; for the log."""
        return self._state.group.generation

    async def run(self) -> None:
        """Runs until the attempt has ended and everything that it started is released."""
        self._loop = asyncio.get_running_loop()
        self._world.node_watch.start(partial(self._call_on_loop, self._follow_nodes))
        self._world.host_watch.start(
            lambda silent: self._call_on_loop(self._post, NodesSilent(silent)), silent_nodes(self._state.pool)
        )
        self._agent_pool.start()
        if self._is_restart:
            self._reattach()
        else:
            first = machine.open_attempt(self._state)
            self._reporter.carry_out([c for c in first if isinstance(c, (Emit, ShowIncident))], self._state)
            numbers = self._orders.issue(first)
            self._write_journal()
            self._perform(first, numbers)
        self._reporter.update_status(self._state)
        while self._state.stage is not Stage.ENDED:
            try:
                oldest = await self._clock.wait_for(self._queue.get(), TICK_S)
            except TimeoutError:
                self._take(Tick())
                continue
            num_more = min(self._queue.qsize(), _MAX_EVENTS - 1)
            self._take(*(events := (oldest, *(self._queue.get_nowait() for _ in range(num_more)))))
            for _ in events:
                self._queue.task_done()
        self._world.node_watch.stop()
        self._world.host_watch.stop()
        self._record_queued_reports()
        await self.inspection.finish(self._end)
        await self._release_all()
        # last: once the end is stored, the control plane kills the actors of the attempt that are left
        if self._end is not None:
            self._reporter.carry_out([self._end], self._state)
            self._write_journal()

    def _record_queued_reports(self) -> None:
        """Records the reports that are still in the queue: the attempt may end by an event that overtook them, such as
        the last validation's."""
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if isinstance(event, ReportArrived):
                self._reporter.record_report(event.item, self._state)
            self._queue.task_done()

    def direct(self, directive: Directive) -> None:
        """Passes on what the control plane wants now; called on a Ray thread."""
        self._call_on_loop(self._follow, directive)

    def _watch_hosts(self) -> None:
        """Watches the hosts of the workers, and that of Ray's head."""
        raylets, head = self._nodes.raylets, self._nodes.head
        nodes = {worker.node_id for worker in self._state.pool.workers} | {head}
        self._world.host_watch.watch({node_id: raylets[node_id] for node_id in nodes if node_id in raylets}, head)

    def _call_on_loop(self, function: Callable[[T], None], argument: T) -> None:
        """Call the function on the loop; from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the attempt is over
                self._loop.call_soon_threadsafe(function, argument)

    def _follow(self, directive: Directive) -> None:
        if directive == self._directive:
            return
        self._directive = directive
        self._reporter.spec_version = directive.spec_version
        self._post(directive)
        self._avoid()

    def _follow_nodes(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        for worker in self._state.pool.workers:
            if worker.info is not None and worker.info.node_id in nodes.dead:
                self._detach(worker.index)
                self._fleet.forget(worker.index)
                message = f"node {worker.info.node_id[:12]} ({worker.info.node_ip}) has died"
                self._post(WorkerLost(worker.index, IncidentCause.NODE_DIED, "node watch", message))
        self._watch_hosts()
        self._avoid()

    def _avoid(self) -> None:
        event = _find_avoided_nodes(self._state, self._directive, self._nodes)
        if event is not None:
            self._post(event)

    def _post(self, event: Event) -> None:
        self._queue.put_nowait(event)

    def _take(self, *events: Event) -> None:
        if jump_s := self._wall_clock.measure_jump_s():
            _log.warning("clock.jumped", extra={"seconds": jump_s})
            events = (ClockJumped(jump_s), *events)  # one turn: a second one would not know that the first was the last
        self._turn(*events)

    def _turn(self, *events: Event) -> None:
        before = self._state
        for event in events:
            if isinstance(event, ReportArrived):
                self._reporter.record_report(event.item, before)
        self._state, commands = machine.step_all(before, events, self._clock.time(), plan)
        self._end = next((c for c in commands if isinstance(c, End)), None)
        self._orders.drop_answered(self._state)
        numbers = self._orders.issue(commands)
        # before the journal is written, whose entry contains what the outbox has not delivered yet
        for command in commands:
            if isinstance(command, (Emit, ShowIncident)):
                self._reporter.carry_out([command], self._state)
            elif isinstance(command, SuspectNode):
                self._reporter.suspect_node(command)
        self.inspection.consider(events, commands, self._directive)
        is_validation = any(isinstance(e, ReportArrived) and isinstance(e.item, ValidationReport) for e in events)
        self._is_unwritten |= is_validation or essential(before) != essential(self._state)
        is_step_note_due = self._clock.monotonic() - self._journaled_mono > _STEP_NOTE_S
        if commands or (self._is_unwritten and self._journal_pace.is_due):
            self._write_journal()
        elif self._state.progress.step != self._journaled_step and is_step_note_due:
            self._write_journal(wait=False)
        self._perform(commands, numbers)
        if before.pool is not self._state.pool:
            self._watch_hosts()
        self._show()

    def _show(self) -> None:
        if self._status_pace.is_due:
            with self._status_pace.measured():
                self._reporter.update_status(self._state)

    def _write_journal(self, *, wait: bool = True) -> None:
        seq, unacknowledged, _ = self._outbox.unacknowledged()
        entry = JournalEntry(
            version=WIRE_VERSION,
            life=self._state.life,
            state=self._state,
            seq=seq,
            unacknowledged=unacknowledged,
            end=self._end.end if self._end else None,
            directive=self._directive,
            issued=self._orders.issued(),
            num_orders=self._orders.num_issued,
        )
        with self._journal_pace.measured():
            self._world.journal.write(entry, wait=wait)
        self._is_unwritten = False
        self._journaled_step, self._journaled_mono = self._state.progress.step, self._clock.monotonic()

    def _perform(self, commands: Iterable[Command], numbers: Iterable[int]) -> None:
        for command, number in zip(commands, numbers, strict=True):
            self._world.before_command(command)
            self._perform_one(command, number)

    def _perform_one(self, command: Command, number: int) -> None:
        match command:
            case StartWorker(index, worker_id):
                self._clients[index] = WorkerClient(index, worker_id, self._context)
                self._clients[index].start(command)
            case KillWorker(index, reason):
                _log.info("worker.kill", extra={"worker": self._worker_id(index), "reason": reason})
                self._kill(index, number)
            case Run() | Interrupt() | RequestYield() | NoteCommit() | RequestSnapshotParts() | CompareModels():
                if client := self._find_client(command.index):
                    client.perform(command)
            case FindCheckpoint():
                self._spawn(self._coordinator.find(command))
            case Commit(name, parts):
                self._spawn(self._coordinator.commit(name, parts, self._state))
            case ForgetDamaged(name, message):
                self._coordinator.show_damaged(name, message)
                self._orders.done(number)
            case Emit() | ShowIncident() | SuspectNode() | End():
                pass  # reported before the journal was written
            case _:
                assert_never(command)

    def _worker_id(self, index: int) -> str:
        worker = self._state.pool.worker(index)
        return worker.worker_id if worker is not None else str(index)

    def _find_client(self, index: int) -> WorkerClient | None:
        """The client of a worker; None if the worker has ended, and its loss is in the queue."""
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

    def _kill(self, index: int, number: int = NO_ORDER) -> None:
        """Ends a worker. `number`: of the order; NO_ORDER: the machine has not ordered it, so it is not repeated."""
        client = self._detach(index)
        if self._state.stage is Stage.ENDED and client is not None:
            self._to_release.append(client)  # its last reports are collected first, see `_release_all`
            return
        task = asyncio.get_running_loop().create_task(self._end_worker(index, number))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _end_worker(self, index: int, number: int) -> None:
        await self._fleet.kill(index)
        self._orders.done(number)

    async def _release_all(self) -> None:
        released = _release_workers(self._fleet, self._clock, self._to_release, self._killing)
        await asyncio.gather(released, self._agent_pool.close())
        await cancel_all([*self._tasks])
        await self._coordinator.remove_torn(self._state)

    def _reattach(self) -> None:
        """Finds the workers by name after a restart, and repeats the orders without an answer. It stops no worker that
        this release can call."""
        workers, orders, dead = (
            self._state.pool.workers,
            dict(self._orders.by_number),
            self._world.node_watch.dead_nodes(),
        )
        same = [w for w in workers if _speaks_this_version(w, self._entry_version)]
        reattached = {w.index for w in same if self._fleet.find(w.index, w.worker_id, w.info)}
        gone = {w.index for w in same} - reattached  # not old ones: an order to start one would find it again
        to_start = {o.index for o in orders.values() if isinstance(o, StartWorker) and o.index in gone}
        to_run = {o.index for o in orders.values() if isinstance(o, Run)}
        self._reporter.carry_out([Emit(SupervisorRestarted(found=len(reattached), of=len(workers)))], self._state)
        for worker in workers:
            if worker.index in reattached:
                client = self._clients[worker.index] = WorkerClient(worker.index, worker.worker_id, self._context)
                client.take_over(worker, self._state.group.generation, is_to_run=worker.index in to_run)
            elif worker.index not in to_start:
                cause = IncidentCause.NODE_DIED if worker.node_id in dead else IncidentCause.WORKER_DIED
                message = "the worker was gone when the supervisor was restarted"
                if not _speaks_this_version(worker, self._entry_version):
                    cause, message = IncidentCause.WORKER_DIED, self._replace_old(worker)
                self._post(WorkerLost(worker.index, cause, "name lookup", message))
        self._post(Reopened())
        self._write_journal()
        for number, order in orders.items():
            if isinstance(order, KillWorker):
                self._find_to_kill(order.index)
            elif isinstance(order, StartWorker) and order.index not in to_start:
                continue
            self._world.before_command(order)
            self._perform_one(order, number)

    def _replace_old(self, worker: Worker) -> str:
        """Ends a worker that another release started: its calls have another form. Its snapshots stay on its node."""
        self._find_to_kill(worker.index)
        self._kill(worker.index)
        version = _find_version(worker, self._entry_version)
        return f"the worker speaks wire version {version}, and the restarted supervisor {WIRE_VERSION}: it is replaced"

    def _find_to_kill(self, index: int) -> None:
        """Finds a worker that the machine has dropped and that may still be there, so that it can be killed."""
        config = self._state.config
        worker_id = worker_name(config.job_id, config.attempt, index)
        if self._fleet.find(index, worker_id, None):
            self._clients[index] = WorkerClient(index, worker_id, self._context)


def _find_version(worker: Worker, entry_version: int) -> int:
    """Version of the wire that the worker speaks."""
    # a worker that was not warm has the version of the journal's entry
    return worker.info.version if worker.info is not None else entry_version


def _speaks_this_version(worker: Worker, entry_version: int) -> bool:
    return _find_version(worker, entry_version) == WIRE_VERSION


async def _release_workers(
    fleet: Fleet, clock: Clock, clients: Sequence[WorkerClient], killing: Collection[asyncio.Task[None]]
) -> None:
    """Stores the files of each node, collects the last output, removes the snapshots, and kills the workers.

    If a worker is not idle, one worker per node stays until all others have ended, and removes the snapshots once more:
    a worker that was starting or training may have created some in the meantime. Idle workers are killed together,
    since another job may wait for their resources.

    Args:
        killing: kills that are under way; also waited for.
    """
    queued_s = later_s(len(clients))
    by_node = list(fleet.by_node().values())
    await asyncio.gather(*(_keep_files(fleet, clock, indexes, _FORGET_S + queued_s) for indexes in by_node))
    await asyncio.gather(*(client.collect_last_reports(_LAST_POLL_S + queued_s) for client in clients))
    forgetting = (_forget_memory(fleet, clock, i, _FORGET_S + queued_s) for i in fleet.by_node().values())
    answers = await asyncio.gather(*forgetting)
    if not killing and all(client.is_idle for client in clients):
        await asyncio.gather(*(fleet.kill(client.index) for client in clients))
        return
    last = [index for index in answers if index is not None]
    others = [client.index for client in clients if client.index not in last]
    await asyncio.gather(*map(fleet.kill, others), *killing)
    await asyncio.gather(*(_forget_memory(fleet, clock, [index], _FORGET_S + queued_s) for index in last))
    await asyncio.gather(*map(fleet.kill, last))


async def _keep_files(fleet: Fleet, clock: Clock, indexes: list[int], limit_s: float) -> None:
    """Let a worker of a node store what the program has written there. `limit_s`: for each answer."""
    until_mono = clock.monotonic() + _KEEP_FILES_S
    for index in indexes:
        with suppress(WorkerCallError, TimeoutError):
            while (is_kept := await clock.wait_for(fleet.keep_files(index), limit_s)) is None:
                if clock.monotonic() > until_mono:
                    return
            if is_kept:
                return


async def _forget_memory(fleet: Fleet, clock: Clock, indexes: list[int], limit_s: float) -> int | None:
    """Remove a node's snapshots through one of its workers. Return the index of that worker; None: no worker answered.

    Args:
        limit_s: for the answer of each.
    """
    for index in indexes:
        with suppress(WorkerCallError, TimeoutError):
            await clock.wait_for(fleet.forget_snapshots(index), limit_s)
            return index
    return None


def _find_avoided_nodes(state: Attempt, directive: Directive | None, nodes: NodeTable) -> NodesAvoided | None:
    """The nodes that the control plane or Ray excludes; None if the attempt knows them already. Ray's deadline replaces
    the control plane's, since Ray enforces it."""
    avoided = {node.node_id: node for node in (directive.avoid if directive is not None else ())}
    for node_id, deadline in nodes.draining.items():
        is_replaceable = avoided[node_id].is_replaceable if node_id in avoided else True
        avoided[node_id] = AvoidedNode(
            node_id=node_id, reason="drained by Ray", deadline=deadline, is_replaceable=is_replaceable
        )
    newest = tuple(avoided[node_id] for node_id in sorted(avoided))
    return NodesAvoided(newest) if newest != state.target.avoided else None


class Pace:
    """How often something is done whose cost grows with the number of workers, and that may be done a little later.

    What takes no time is done at once, each time. What takes longer is done so rarely that it takes at most a tenth of
    the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cost_s = 0.0
        """Seconds that it took the last time."""
        self._ended_mono = 0.0

    @property
    def is_due(self) -> bool:
        if self._cost_s < _CHEAP_S:
            return True
        return self._clock.monotonic() - self._ended_mono >= self._cost_s / _SHARE

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure how long the work within takes."""
        began = self._clock.monotonic()
        yield
        self._ended_mono = self._clock.monotonic()
        self._cost_s = self._ended_mono - began
