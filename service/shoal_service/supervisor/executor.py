"""Executor: feeds what happens to the attempt machine, and does what it says. One asyncio loop in one thread.

Ray answers, storage answers, directives, time  -->  queue  -->  step(state, event, now)
                                                                      |
      fleet (Ray calls), catalog (storage), newsdesk  <--  commands --+--> journal, before they are performed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, assert_never

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from shoal_service.checkpoints import CheckpointCatalog
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.commands import (
    AskHoldings,
    Command,
    Commit,
    Emit,
    End,
    FindCheckpoint,
    ForgetDamaged,
    Interrupt,
    KillProcess,
    RequestYield,
    Run,
    ShowIncident,
    StartProcess,
    SuspectNode,
)
from shoal_service.core.attempt.events import (
    ElasticityChanged,
    Event,
    GrantChanged,
    NewsArrived,
    ProcessFailedToStart,
    ProcessLost,
    ProcessWarm,
    RunReturned,
    Tick,
    WantedChanged,
)
from shoal_service.core.attempt.state import Attempt, Stage
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.fleet import Fleet, cause_of
from shoal_service.supervisor.journal import Journal, JournalEntry
from shoal_service.supervisor.newsdesk import Newsdesk
from shoal_service.supervisor.reporter import Reporter
from shoal_service.supervisor.vault import Vault
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import Assignment, ErrorReport, ValidationReport

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_POLL_WAIT_S = 10.0
_FAREWELL_S = 1.0


class Executor:
    """`run` is the whole life of an attempt; `direct` may be called from any thread."""

    def __init__(self, config: SupervisorConfig, journal: Journal, newsdesk: Newsdesk, entry: JournalEntry | None):
        self._config = config
        self._journal = journal
        self._newsdesk = newsdesk
        self._fleet = Fleet(config)
        self._reporter = Reporter(newsdesk, config)
        self._vault = Vault(CheckpointCatalog(config.checkpoint_root), config, self._reporter, self._post)
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: dict[int, list[asyncio.Task[None]]] = {}
        self._heard: dict[int, int] = {}
        """Up to which number each process was listened to."""
        self._leaving: list[int] = []
        self._end: End | None = End(entry.end) if entry and entry.end else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._directive = entry.directive if entry else None
        self._resumed = entry is not None
        self._state = entry.state if entry else _new_attempt(config)

    async def run(self) -> None:
        """Until the attempt has ended and everything it started is released."""
        self._loop = asyncio.get_running_loop()
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
        await asyncio.gather(*(self._farewell(index) for index in self._leaving))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
        if directive.elasticity != self._state.spec.elasticity:
            self._post(ElasticityChanged(directive.elasticity))
        if directive.granted != self._state.granted:
            self._post(GrantChanged(directive.granted))
        if directive.wanted is not self._state.wanted:
            self._post(WantedChanged(directive.wanted))

    def _post(self, event: Event) -> None:
        self._queue.put_nowait(event)

    def _take(self, event: Event) -> None:
        before = self._state
        if isinstance(event, NewsArrived):
            self._reporter.note(event.item, before)
        self._state, commands = machine.step(before, event, time.time())
        self._end = next((c for c in commands if isinstance(c, End)), None)
        self._reporter.tell([c for c in commands if isinstance(c, (Emit, ShowIncident))], self._state)
        is_validation = isinstance(event, NewsArrived) and isinstance(event.item, ValidationReport)
        if commands or is_validation or _differs(before, self._state):
            self._write_journal()
        self._perform(c for c in commands if not isinstance(c, (Emit, ShowIncident, End)))
        self._reporter.show(self._state)

    def _write_journal(self) -> None:
        seq, untold, _ = self._newsdesk.untold()
        end = self._end.end if self._end else None
        self._journal.write(JournalEntry(state=self._state, seq=seq, untold=untold, end=end, directive=self._directive))

    def _perform(self, commands: Any) -> None:
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case StartProcess(index, shard_id):
                self._fleet.start(index, shard_id)
                self._watch(index, self._bring_up(index))
                self._watch(index, self._listen(index))
            case KillProcess(index, reason):
                _log.info("killing process", extra={"index": index, "reason": reason})
                self._drop(index)
                if self._state.stage is Stage.ENDED:
                    self._leaving.append(index)
                else:
                    self._fleet.kill(index)
            case Run(index, assignment):
                self._watch(index, self._attend(index, assignment))
            case Interrupt(index, generation) if self._fleet.knows(index):
                self._watch(index, self._call(self._fleet.interrupt(index, generation)))
            case RequestYield(index, generation, durable) if self._fleet.knows(index):
                self._watch(index, self._call(self._fleet.request_yield(index, generation, durable)))
            case AskHoldings() | SuspectNode():
                pass
            case Interrupt() | RequestYield():
                pass  # it is gone, and the machine is about to hear of it
            case FindCheckpoint(excluding):
                self._spawn(self._vault.find(excluding))
            case Commit(name, parts):
                self._spawn(self._vault.commit(name, parts, self._state))
            case ForgetDamaged(name, message):
                self._spawn(self._vault.show_damaged(name, message))
            case Emit() | ShowIncident() | End():
                raise AssertionError("told by _take and run")
            case _:
                assert_never(command)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch(self, index: int, work: Coroutine[Any, Any, None]) -> None:
        still_running = [task for task in self._watchers.get(index, []) if not task.done()]
        self._watchers[index] = [*still_running, self._spawn(work)]

    def _drop(self, index: int) -> None:
        for task in self._watchers.pop(index, []):
            task.cancel()

    async def _bring_up(self, index: int) -> None:
        try:
            answer = await self._fleet.prepare(index)
        except RayError as error:
            self._lost(index, error, "prepare call")
            return
        if isinstance(answer, ErrorReport):
            self._post(ProcessFailedToStart(index, answer))
        else:
            self._post(ProcessWarm(index, answer))

    async def _attend(self, index: int, assignment: Assignment) -> None:
        """The one `run` call in flight: its answer, or its failing."""
        try:
            self._post(RunReturned(index, await self._fleet.run(index, assignment)))
        except ActorUnavailableError:
            await self._rejoin(index, assignment.generation)
        except RayError as error:
            self._lost(index, error, "run call")

    async def _rejoin(self, index: int, generation: int) -> None:
        """Unavailable is not dead, and a restarted supervisor has lost its calls: ask again for the answer."""
        while True:
            try:
                self._post(RunReturned(index, await self._fleet.join(index, generation)))
                return
            except ActorUnavailableError:
                await asyncio.sleep(_TICK_S)  # Ray re-connects, or calls it dead after its own health check
            except RayError as error:
                self._lost(index, error, "join call")
                return

    async def _listen(self, index: int) -> None:
        """Long-polls one process for news, logs and progress, as long as it lives.

        The process keeps what it told until the control plane has stored it: a supervisor that dies before loses
        nothing. What was stored, but not acknowledged yet, is told again: steps overwrite themselves, and some lines of
        the log are there twice.
        """
        receipts: deque[tuple[int, int]] = deque()
        """Of each answer: its number, and the newsdesk's once all of it was told there."""
        acknowledged = 0
        while True:
            while receipts and receipts[0][1] <= self._newsdesk.acknowledged:
                acknowledged, _ = receipts.popleft()
            try:
                poll = await self._fleet.poll(index, self._heard.get(index, 0), acknowledged, _POLL_WAIT_S)
            except ActorUnavailableError:
                await asyncio.sleep(_TICK_S)
                continue
            except RayError as error:
                self._lost(index, error, "poll call")  # the run call says so too, if there is one; who is first counts
                return
            self._heard[index] = poll.seq
            self._reporter.heard(index, poll, self._state)
            for item in poll.news:
                self._post(NewsArrived(index, item))
            await self._queue.join()
            receipts.append((poll.seq, self._newsdesk.seq))

    async def _farewell(self, index: int) -> None:
        """The attempt is over: hear what a process printed last, then kill it."""
        if not self._fleet.knows(index):
            return
        with contextlib.suppress(RayError, TimeoutError):
            heard = self._heard.get(index, 0)
            call = self._fleet.poll(index, heard, heard, 0.0)
            self._reporter.heard(index, await asyncio.wait_for(call, timeout=_FAREWELL_S), self._state)
        self._fleet.kill(index)

    async def _call(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except RayError as error:
            _log.info("a control call failed; the run call will say why", extra={"error": str(error)})

    def _lost(self, index: int, error: RayError, witness: str) -> None:
        cause = cause_of(error) if isinstance(error, RayActorError) else IncidentCause.SHARD_DIED
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, RayActorError):
            self._fleet.forget(index)
        else:
            self._fleet.kill(index)  # a fault of our own in a process that lives: it must not keep its resources
        self._post(ProcessLost(index, cause, witness, message))

    def _re_attach(self) -> None:
        """After the supervisor's own death: processes are found by name; none of them is stopped."""
        found = {p.index for p in self._state.processes if self._fleet.find(p.index, p.shard_id)}
        self._reporter.tell(
            [Emit("supervisor.restarted", {"found": len(found), "of": len(self._state.processes)})], self._state
        )
        for process in self._state.processes:
            if process.index not in found:
                self._post(ProcessLost(process.index, IncidentCause.SHARD_DIED, "name lookup", "gone"))
                continue
            self._watch(process.index, self._listen(process.index))
            if process.in_run:
                self._watch(process.index, self._rejoin(process.index, self._state.generation))
            elif not process.warm:
                self._watch(process.index, self._bring_up(process.index))
        self._perform(machine.reopen(self._state))


def _new_attempt(config: SupervisorConfig) -> Attempt:
    return Attempt(
        job_id=config.job_id,
        attempt=config.attempt,
        spec=config.spec,
        checkpoint_root=config.checkpoint_root,
        granted=config.granted,
        timeouts=config.timeouts,
        since=time.time(),
    )


def _differs(before: Attempt, after: Attempt) -> bool:
    """Worth a journal entry: anything but the step counter, which the shards know themselves."""
    return before.model_copy(update={"step": after.step, "fruitless": after.fruitless}) != after
