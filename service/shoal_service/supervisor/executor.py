"""Executor: feeds what happens to the attempt machine, and does what it says. One asyncio loop in one thread.

Ray answers, storage answers, directives, nodes, time  -->  queue  -->  step(state, event, now)
                                                                             |
      clients (Ray calls), coordinator (storage), outbox  <--  commands  -----+--> journal, before they are performed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any, assert_never

from ray.exceptions import RayError

from shoal_service.cluster import gcs
from shoal_service.cluster.node_watch import NodesSeen, NodeWatch
from shoal_service.core import goodput
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
from shoal_service.core.attempt.events import (
    DesiredChanged,
    ElasticityChanged,
    Event,
    GrantChanged,
    NodesAvoided,
    ParallelismChanged,
    ReportArrived,
    Tick,
    WorkerLost,
)
from shoal_service.core.attempt.state.attempt import Attempt, essential
from shoal_service.core.attempt.state.stages import Opening, Stage
from shoal_service.core.attempt.state.target import AttemptConfig, Target
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.planner import plan
from shoal_service.supervisor.checkpoint_catalog import CheckpointCatalog
from shoal_service.supervisor.checkpoint_coordinator import CheckpointCoordinator
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.fleet import Fleet
from shoal_service.supervisor.journal import Journal, JournalEntry
from shoal_service.supervisor.outbox import Outbox
from shoal_service.supervisor.reporter import Reporter
from shoal_service.supervisor.worker_client import SupervisorContext, WorkerClient
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ValidationReport

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_NOTE_S = 2.0
"""At least so often the newest step is in the journal, so that it is known how many are lost if the supervisor and all
shards die together. No command follows from it, and nobody waits for it to be written."""
_FORGET_S = 2.0


class Executor:
    """`run` is the whole life of an attempt; `direct` may be called from any thread."""

    def __init__(self, config: SupervisorConfig, journal: Journal, outbox: Outbox, entry: JournalEntry | None):
        self._journal = journal
        self._outbox = outbox
        self._fleet = Fleet(config)
        self._reporter = Reporter(outbox, config)
        catalog = CheckpointCatalog(config.checkpoint_root)
        self._coordinator = CheckpointCoordinator(catalog, config, self._reporter, self._post, journal.require_current)
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._killing: set[asyncio.Task[None]] = set()
        self._clients: dict[int, WorkerClient] = {}
        self._leaving: list[WorkerClient] = []
        self._context = SupervisorContext(
            fleet=self._fleet, outbox=outbox, reporter=self._reporter, post=self._post,
            settled=self._queue.join, state=lambda: self._state, kill=self._kill, spawn=self._spawn,
            raylet=lambda node_id: self._seen.raylets.get(node_id),
        )  # fmt: skip
        self._watch = NodeWatch(self._nodes_seen)
        self._seen = NodesSeen()
        self._end: End | None = End(entry.end) if entry and entry.end else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._directive = entry.directive if entry else None
        self._resumed = entry is not None
        self._state = entry.state if entry else _new_attempt(config)
        self._noted_step, self._noted_mono = self._state.progress.step, 0.0

    async def run(self) -> None:
        """Until the attempt has ended and everything it started is released."""
        self._loop = asyncio.get_running_loop()
        self._watch.start()
        if self._resumed:
            self._re_attach()
        else:
            self._perform(machine.open_attempt())
        self._reporter.show(self._state)
        while self._state.stage is not Stage.ENDED:
            try:
                event = await asyncio.wait_for(self._queue.get(), timeout=_TICK_S)
            except TimeoutError:
                self._take(Tick())
                continue
            self._take(event)
            self._queue.task_done()
        self._watch.stop()
        await self._release_all()
        if self._end is not None:
            self._reporter.tell([self._end], self._state)
            self._write_journal()

    def direct(self, directive: Directive) -> None:
        """From a Ray thread: what the control plane wants now."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._follow, directive)

    def _follow(self, directive: Directive) -> None:
        if directive == self._directive:
            return
        self._directive = directive
        self._reporter.spec_version = directive.spec_version
        if directive.elasticity != self._state.target.spec.elasticity:
            self._post(ElasticityChanged(directive.elasticity))
        if directive.parallelism != self._state.target.spec.parallelism:
            self._post(ParallelismChanged(directive.parallelism))
        if directive.granted != self._state.target.granted:
            self._post(GrantChanged(directive.granted))
        if directive.desired is not self._state.target.desired:
            self._post(DesiredChanged(directive.desired))
        self._avoid()

    def _nodes_seen(self, seen: NodesSeen) -> None:
        """From the watching thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: the attempt is over
                self._loop.call_soon_threadsafe(self._follow_nodes, seen)

    def _follow_nodes(self, seen: NodesSeen) -> None:
        self._seen = seen
        for worker in self._state.pool.workers:
            if worker.info is not None and worker.info.node_id in seen.dead:
                self._part_with(worker.index)
                self._fleet.forget(worker.index)
                message = f"node {worker.info.node_id[:12]} ({worker.info.node_ip}) has died"
                self._post(WorkerLost(worker.index, IncidentCause.NODE_DIED, "node watch", message))
        self._avoid()

    def _avoid(self) -> None:
        """What the control plane and Ray say together; Ray's deadline counts, since it is Ray that keeps it."""
        told = self._directive.avoid if self._directive is not None else ()
        avoided = {node.node_id: node for node in told}
        for node_id, deadline in self._seen.draining.items():
            avoided[node_id] = AvoidedNode(node_id=node_id, reason="drained by Ray", deadline=deadline)
        nodes = tuple(avoided[node_id] for node_id in sorted(avoided))
        if nodes != self._state.target.avoided:
            self._post(NodesAvoided(nodes))

    def _post(self, event: Event) -> None:
        self._queue.put_nowait(event)

    def _take(self, event: Event) -> None:
        before = self._state
        if isinstance(event, ReportArrived):
            self._reporter.note(event.item, before)
        self._state, commands = machine.step(before, event, time.time(), plan)
        self._end = next((c for c in commands if isinstance(c, End)), None)
        for command in commands:
            if isinstance(command, (Emit, ShowIncident)):
                self._reporter.tell([command], self._state)
            elif isinstance(command, SuspectNode):
                self._reporter.suspect(command)
        is_validation = isinstance(event, ReportArrived) and isinstance(event.item, ValidationReport)
        if commands or is_validation or essential(before) != essential(self._state):
            self._write_journal()
        elif self._state.progress.step != self._noted_step and time.monotonic() - self._noted_mono > _NOTE_S:
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
        self._noted_step, self._noted_mono = self._state.progress.step, time.monotonic()

    def _perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case StartWorker(index, worker_id, avoid_nodes, only_on):
                self._clients[index] = WorkerClient(index, worker_id, self._context)
                self._clients[index].start(avoid_nodes, only_on)
            case KillWorker(index, reason):
                _log.info("killing worker", extra={"index": index, "reason": reason})
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
                pass  # told before the journal was written
            case _:
                assert_never(command)

    def _client(self, index: int) -> WorkerClient | None:
        """None: the worker is gone, and the machine is about to hear of it."""
        return self._clients.get(index) if self._fleet.knows(index) else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _part_with(self, index: int) -> WorkerClient | None:
        client = self._clients.pop(index, None)
        if client is not None:
            client.leave()
        return client

    def _kill(self, index: int) -> None:
        client = self._part_with(index)
        if self._state.stage is Stage.ENDED and client is not None:
            self._leaving.append(client)  # to be acknowledged out first, see _release_all
            return
        task = asyncio.get_running_loop().create_task(self._fleet.kill(index))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _release_all(self) -> None:
        """The attempt is over: hear what the workers printed last, remove the snapshots, end the workers, remove
        what they had begun to save."""
        await asyncio.gather(*(client.farewell() for client in self._leaving))
        answers = await asyncio.gather(*map(self._forget_memory, self._fleet.by_node().values()))
        last = [index for index in answers if index is not None]
        others = [client.index for client in self._leaving if client.index not in last]
        await asyncio.gather(*map(self._fleet.kill, others), *self._killing)
        await asyncio.gather(*(self._forget_memory([index]) for index in last))  # of who was just about to start
        await asyncio.gather(*map(self._fleet.kill, last))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._coordinator.remove_torn(self._state)

    async def _forget_memory(self, indexes: list[int]) -> int | None:
        """One worker does it for all of its node; which one."""
        for index in indexes:
            try:
                await asyncio.wait_for(self._fleet.forget_memory(index), timeout=_FORGET_S)
                return index
            except (RayError, TimeoutError):
                continue
        return None

    def _re_attach(self) -> None:
        """After the supervisor's own death: workers are found by name; none of them is stopped."""
        workers = self._state.pool.workers
        dead = _dead_nodes()
        found = {p.index for p in workers if self._fleet.find(p.index, p.worker_id, p.info)}
        self._reporter.tell([Emit("supervisor.restarted", {"found": len(found), "of": len(workers)})], self._state)
        for worker in workers:
            if worker.index not in found:
                by_node = worker.info is not None and worker.info.node_id in dead
                cause = IncidentCause.NODE_DIED if by_node else IncidentCause.WORKER_DIED
                message = "it was gone when the supervisor came back"
                self._post(WorkerLost(worker.index, cause, "name lookup", message))
                continue
            client = self._clients[worker.index] = WorkerClient(worker.index, worker.worker_id, self._context)
            client.listen()
            if worker.info is not None:
                client.watch(worker.info)
            if worker.in_run:
                client.rejoin(self._state.group.generation)
            elif not worker.warm:
                client.bring_up()
        self._perform(machine.reopen(self._state))


def _dead_nodes() -> frozenset[str]:
    try:
        return frozenset(node.node_id for node in gcs.nodes() if not node.is_alive)
    except gcs.GcsUnavailable:
        return frozenset()  # it only changes the words


def _new_attempt(config: SupervisorConfig) -> Attempt:
    now = time.time()
    return Attempt(
        config=AttemptConfig(
            job_id=config.job_id,
            attempt=config.attempt,
            checkpoint_root=config.checkpoint_root,
            timeouts=config.timeouts,
            profile=config.profile,
        ),
        target=Target(spec=config.spec, granted=config.granted, avoided=config.avoid),
        current=Opening(since=now),
        ledger=goodput.resume(config.goodput, at=now),
    )
