"""Looks into the workers of an attempt without deciding anything about it: stacks, suspects, profiles, metrics.

    StackTaker        takes the stacks of all ranks as soon as a group stands still. If an incident follows, they become
                      a part of it; with progress they are dropped
    SuspectFinder     names whom an incident or a slow-down suspects: core/culprit.py decides
    ProfileTaker      passes on the request for a profile
    MetricsForwarder  passes the points of a job to its metrics hook, which runs beside one of the workers:

        reporter --> MetricBacklog --batch--> worker's HookProcess --> the user's hook
                          ^---------------- logged up to -------'

The executor calls Inspection after each turn of the machine. Nothing here delays the attempt but the hook at its end,
by `_LAST_S` at most: the group is interrupted when the machine says so, whether its stacks have arrived or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import assert_never

from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.messages import Command, Emit, End, Event, ReportArrived, ShowIncident
from shoal_service.core.attempt.state import Attempt, Stage
from shoal_service.core.culprit import (
    Ends,
    Pace,
    SlowDown,
    step_done,
    suspect_of,
    whom_do_they_wait_for,
    whose_link,
)
from shoal_service.core.endings import ENDINGS, Retry
from shoal_service.core.events import MetricsHookFailed, StacksTaken, StepsSlow, StragglerFound
from shoal_service.core.profiles import (
    GroupFacts,
    Looked,
    ProfileEvent,
    ProfileState,
    Report,
    Reported,
    Send,
    Wanted,
    step,
)
from shoal_service.core.stacks import cluster, trimmed
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.protocols import WorkerCallError, WorkerUnavailable
from shoal_service.supervisor.workers.worker_client import SupervisorContext
from shoal_workers.contract import (
    EndReason,
    JobState,
    MetricsBatch,
    MetricsProgress,
    Profiled,
    ProfileRequest,
    Stacks,
    StepReport,
    Suspect,
)

_log = logging.getLogger(__name__)
_RETRY_S = 0.25
_REQUEST_S = 30.0
STANDSTILL = "the group stands still"
_Standstill = tuple[int, float]
"""The generation that stands still, and the time of its last progress."""


class Inspection:
    """Looks into the workers after each turn of the machine."""

    def __init__(
        self,
        config: SupervisorConfig,
        context: SupervisorContext,
    ) -> None:
        self.stacks = StackTaker(context)
        self._suspects = SuspectFinder(self.stacks, context)
        self._profiles = ProfileTaker(context)
        self._metrics = MetricsForwarder(config.spec.metrics.hook, context)

    def consider(self, events: Sequence[Event], commands: Iterable[Command], directive: Directive | None) -> None:
        """Look at a turn of the machine, before its commands are performed."""
        self.stacks.consider(commands)
        self._suspects.consider(events)
        self._profiles.consider(events, directive)
        self._metrics.consider()

    async def finish(self, end: End | None) -> None:
        """Finish before the workers are released. `end`: None if the attempt goes on in another supervisor."""
        if end is not None:
            await self._metrics.finish(end.end.reason)


class StackTaker:
    """Takes the stacks of all workers on request, and by itself when a group stands still or a rank is slow."""

    def __init__(self, context: SupervisorContext) -> None:
        self._context = context
        self._loop: asyncio.AbstractEventLoop | None = None
        self._standstill: _Standstill | None = None
        """The standstill whose stacks were asked for last."""
        self._taken: Stacks | None = None
        """The stacks of that standstill; None if they have not arrived."""
        self._awaiting: int | None = None
        """Id of the incident that began before the stacks of its standstill had arrived; None if there is none."""
        self.suspected_incident: int | None = None
        """Id of the incident whose suspect was found by its stacks; None if there is none."""

    def take_on_request(self, rank: int | None, *, native: bool) -> Stacks | None:
        """Take the stacks of all workers, or of one rank; from any thread but the loop's. None if the attempt is over,
        or begins."""
        if self._loop is None or self._loop.is_closed():
            return None
        work = self.take("requested", rank=rank, native=native)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_REQUEST_S)

    async def take(self, reason: str, *, rank: int | None = None, native: bool = False) -> Stacks:
        """Take the stacks of all workers, or of one rank. It needs some seconds at most, and raises nothing."""
        state = self._context.state()
        workers = [w for w in state.pool.workers if rank is None or state.group.rank_of(w.index) == rank]
        known = [w for w in workers if self._context.fleet.knows(w.index)]
        taken = await asyncio.gather(*(self._context.fleet.stack(w.index, native=native) for w in known))
        ranks = [state.group.rank_of(w.index) if state.group_active else None for w in known]
        samples = [
            (r, s.model_copy(update={"worker_id": w.worker_id})) for r, s, w in zip(ranks, taken, known, strict=True)
        ]
        at = self._context.clock.time()
        report = cluster(samples, at=at, generation=state.group.generation, reason=reason)
        if reason != STANDSTILL:
            return report
        ips = [w.info.node_ip if w.info is not None else "" for w in known]
        of_group = [(r, ip, s) for (r, s), ip in zip(samples, ips, strict=True) if r is not None]
        return report.model_copy(update={"suspect": whom_do_they_wait_for(of_group)})

    async def find_bad_link(self) -> Suspect | None:
        """Find the suspect whose link between nodes is bad now; None if no link is bad."""
        state = self._context.state()
        workers = [
            w for i in state.group.workers if (w := state.pool.worker(i)) is not None and self._context.fleet.knows(i)
        ]
        taken = await asyncio.gather(*(self._context.fleet.stack(w.index) for w in workers))
        return whose_link(
            [
                Ends(rank, worker.info.node_ip, stack.links)
                for worker, stack in zip(workers, taken, strict=True)
                if (rank := state.group.rank_of(worker.index)) is not None and worker.info is not None
            ]
        )

    def consider(self, commands: Iterable[Command]) -> None:
        """Look at a turn of the machine, before its commands are performed."""
        self._loop, state = asyncio.get_running_loop(), self._context.state()
        for command in commands:
            match command:
                case Emit(StragglerFound(rank=rank)):
                    self._context.spawn(self._take_of_slow(f"rank {rank} is slow"))
                case ShowIncident(incident, closed_at=None):
                    self._attach(incident.id, incident.before.generation)
        standstill = (state.group.generation, hangs.newest_progress(state))
        if standstill == self._standstill or self._awaiting is not None:
            return
        self._standstill, self._taken = None, None  # it made progress since
        self._context.reporter.set_standstill("")
        if hangs.find_standstill(state, self._context.clock.time()):
            self._standstill = standstill
            self._context.spawn(self._take_of_standstill(standstill))

    async def _take_of_slow(self, reason: str) -> None:
        self._context.reporter.emit(StacksTaken(stacks=trimmed(await self.take(reason))))

    async def _take_of_standstill(self, standstill: _Standstill) -> None:
        stacks = await self.take(STANDSTILL)
        if standstill != self._standstill:
            return
        self._taken = stacks
        self._context.reporter.set_standstill(stacks.summary)
        if self._awaiting is not None:
            self._add_to_incident(self._awaiting, stacks)

    def _attach(self, incident_id: int, generation: int) -> None:
        """Attaches the stacks to an incident of this generation that has begun."""
        if self._standstill is None or self._standstill[0] != generation:
            return
        if self._taken is not None:
            self._add_to_incident(incident_id, self._taken)
        else:
            self._awaiting = incident_id

    def _add_to_incident(self, incident_id: int, stacks: Stacks) -> None:
        self._standstill, self._taken, self._awaiting = None, None, None
        kept = trimmed(stacks)
        self._context.reporter.keep_stacks(incident_id, kept)
        if kept.suspect is not None:
            self._context.reporter.keep_suspect(incident_id, kept.suspect)
            self.suspected_incident = incident_id
        self._context.reporter.emit(StacksTaken(stacks=kept, incident=incident_id))


class SuspectFinder:
    """Reports the suspect of an incident or of a slow-down, as an event and as a part of the incident."""

    def __init__(self, stacks: StackTaker, context: SupervisorContext) -> None:
        self._stacks = stacks
        self._context = context
        self._pace = Pace()
        self._named: tuple[int, Suspect] | None = None
        """Id of the incident whose suspect was found without stacks, and that suspect; None if there is none."""

    def consider(self, events: Iterable[Event]) -> None:
        """Look at a turn of the machine."""
        state = self._context.state()
        for event in events:
            if isinstance(event, ReportArrived) and isinstance(event.item, StepReport):
                self._step_done(event.item, state)
        incident = state.incident
        if incident is None or self._stacks.suspected_incident == incident.id:
            return
        suspect = suspect_of(incident, tuple(state.group.exits.values()), all_left=state.all_left)
        if suspect is not None and (self._named is None or not _is_same(self._named, incident.id, suspect)):
            self._named = incident.id, suspect
            self._context.reporter.keep_suspect(incident.id, suspect)

    def _step_done(self, report: StepReport, state: Attempt) -> None:
        if report.generation != state.group.generation:
            return
        self._pace, suspicion = step_done(self._pace, report)
        if suspicion is None:
            return
        if suspicion.suspect is not None:
            self._emit(suspicion, suspicion.suspect)
        else:
            self._context.spawn(self._check_links(suspicion))

    async def _check_links(self, slow_down: SlowDown) -> None:
        self._emit(slow_down, await self._stacks.find_bad_link())

    def _emit(self, slow_down: SlowDown, suspect: Suspect | None) -> None:
        self._context.reporter.emit(
            StepsSlow(step=slow_down.step, usual_s=slow_down.usual_s, now_s=slow_down.now_s, suspect=suspect)
        )


def _is_same(named: tuple[int, Suspect], incident_id: int, suspect: Suspect) -> bool:
    # the words of a death come later than the death; that is no new suspicion
    return named[0] == incident_id and (named[1].resource, named[1].ranks) == (suspect.resource, suspect.ranks)


class ProfileTaker:
    """Passes the request for a profile to the worker of its rank, and its end to the control plane. `core.profiles`
    decides. A restarted supervisor begins anew with the directive of its journal: the worker ignores a number that it
    has had."""

    def __init__(self, context: SupervisorContext) -> None:
        self._context = context
        self._state = ProfileState()
        self._requested: ProfileRequest | None = None
        """The request of the newest directive; None if it has none."""

    def consider(self, events: Iterable[Event], directive: Directive | None) -> None:
        """Look at a turn of the machine. It costs nothing while no profile is requested, however large the group
        is."""
        request = directive.profile if directive is not None else None
        if request != self._requested:
            self._requested = request
            self._take(Wanted(request))
        reports = [e.item for e in events if isinstance(e, ReportArrived) and isinstance(e.item, Profiled)]
        for item in reports:
            self._take(Reported(item))
        if not reports and self._state.request is not None:
            self._take(Looked())

    def _take(self, event: ProfileEvent) -> None:
        self._state, commands = step(self._state, event, _make_facts(self._context.state()), self._context.clock.time())
        for command in commands:
            match command:
                case Send():
                    self._context.spawn(self._send(command))
                case Report(item):
                    self._context.reporter.add(item)
                case _:
                    assert_never(command)

    async def _send(self, order: Send) -> None:
        """Sends the request, again and again while the worker cannot be reached and the request goes on."""
        while self._state.request == order.request:
            try:
                await self._context.fleet.request_profile(order.index, order.generation, order.request)
                return
            except WorkerUnavailable:
                await self._context.clock.sleep(_RETRY_S)
            except WorkerCallError as error:
                # not an event: the `run` call of this worker fails too, and the request ends with its generation
                _log.info("profile.request_failed", extra={"number": order.request.number, "error": str(error)})
                return


def _make_facts(state: Attempt) -> GroupFacts:
    return GroupFacts(
        generation=state.group.generation,
        is_running=state.stage is Stage.RUNNING,
        is_active=state.stage in (Stage.RUNNING, Stage.SWITCHING),
        workers=state.group.workers,
        alive=frozenset(worker.index for worker in state.pool.workers),
        step=state.progress.step,
        cause=state.incident.cause.value if state.incident is not None else "",
    )


_PACE_S = 0.5
"""Pause between two batches."""
_LAST_PACE_S = 0.1
_LAST_S = 10.0
"""How long the end of an attempt waits for the hook, if it does not fail."""
_CALL_S = 10.0
_MOST_AT_ONCE = 1000


class MetricsForwarder:
    def __init__(self, hook: str | None, context: SupervisorContext) -> None:
        """`hook`: `metrics.hook` of the spec."""
        self._hook = hook
        self._context = context
        self._backlog = context.reporter.backlog
        self._index: int | None = None
        """The worker beside which the hook runs."""
        self._error = ""
        """Error of the last answer; empty: there was none."""
        self._is_started = False

    def consider(self) -> None:
        """Start to forward once there is a point. Costs nothing without a hook."""
        if self._hook is not None and not self._is_started and self._backlog.num_waiting:
            self._is_started = True
            self._context.spawn(self._forward_forever())

    async def finish(self, reason: EndReason) -> None:
        """Send the last points and the end of the attempt to the hook."""
        if self._hook is None or self._backlog.added == 0:
            return
        end, until = describe_end(reason), self._context.clock.monotonic() + _LAST_S
        why = f"it did not log the last points within {_LAST_S:.0f} s of the end"
        while self._context.clock.monotonic() < until:
            progress = await self._forward(end)
            if progress is None or progress.error:
                why = progress.error if progress is not None else "no worker is left to run it"
                break
            if progress.has_ended:
                return
            await self._context.clock.sleep(_LAST_PACE_S)
        self._emit_failure(why)

    async def _forward_forever(self) -> None:
        while True:
            if self._backlog.num_waiting:
                await self._forward("")
            await self._context.clock.sleep(_PACE_S)

    async def _forward(self, end: str) -> MetricsProgress | None:
        """Send one batch. None if no worker could take it."""
        index = self._choose_worker()
        if index is None:
            return None
        points = self._backlog.read_oldest(_MOST_AT_ONCE)
        batch = MetricsBatch(points=points, end="" if len(points) < self._backlog.num_waiting else end)
        try:
            progress = await self._context.clock.wait_for(self._context.fleet.forward_metrics(index, batch), _CALL_S)
        except (WorkerCallError, TimeoutError) as error:
            _log.info("metrics_hook.unreachable", extra={"worker": index, "error": str(error)})
            return MetricsProgress()
        self._backlog.drop_logged(progress.logged)
        if progress.error and progress.error != self._error:
            self._emit_failure(progress.error)
        self._error = progress.error
        return progress

    def _choose_worker(self) -> int | None:
        """Return the worker beside which the hook runs: the same as before while it is there, so there is one hook at a
        time; otherwise rank 0 of the group."""
        if self._index is None or not self._context.fleet.knows(self._index):
            ranks = self._context.state().group.ranks
            alive = [
                index for index in sorted(ranks, key=lambda index: ranks[index]) if self._context.fleet.knows(index)
            ]
            self._index = alive[0] if alive else None
        return self._index

    def _emit_failure(self, error: str) -> None:
        event = MetricsHookFailed(
            hook=self._hook or "",
            message=error,
            num_waiting=self._backlog.num_waiting,
            num_dropped=self._backlog.num_dropped,
        )
        self._context.reporter.emit(event)
        self._error = error


def describe_end(reason: EndReason) -> str:
    """Return what `Hook.end` is told. The control plane decides whether a job goes on after an attempt that failed."""
    ending = ENDINGS[reason]
    if ending.retry is Retry.FREE:
        return JobState.QUEUED.value.lower()
    return ending.state.value.lower()
