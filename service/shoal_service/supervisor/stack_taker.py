"""StackTaker: the stacks of all workers, on request; and by itself when a group stands still, or when a rank is slow.

    group stands still  ->  stacks are taken at once, while all ranks still stand where they stand
    incident opens      ->  the stacks of this standstill become a part of it, and an event
    progress            ->  they are dropped

Made and called by the executor, on its loop. It decides nothing about the attempt, and delays nothing: the group is
interrupted when the attempt machine says so, whether its stacks have arrived or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.commands import Command, Emit, ShowIncident
from shoal_service.core.attempt.stacks import cluster, trimmed
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.culprit.links import Ends, whose_link
from shoal_service.core.culprit.standstill import whom_do_they_wait_for
from shoal_service.core.events.workers import StacksTaken, StragglerFound
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_workers.contract.errors.suspects import Suspect
from shoal_workers.contract.messages import Stacks

_REQUEST_S = 30.0
STANDSTILL = "the group stands still"
_Standstill = tuple[int, float]
"""Generation, and time of the last progress."""


class StackTaker:
    def __init__(
        self,
        world: World,
        reporter: Reporter,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        state: Callable[[], Attempt],
    ) -> None:
        """
        Args:
            spawn: runs work on the executor's loop until the attempt ends.
            state: the current one.
        """
        self._fleet = world.fleet
        self._clock = world.clock
        self._reporter = reporter
        self._spawn = spawn
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._standstill: _Standstill | None = None
        """The one whose stacks were asked for last."""
        self._taken: Stacks | None = None
        """Of this standstill."""
        self._waiting: int | None = None
        """The incident that began before the stacks of its standstill had arrived."""
        self.named: int | None = None
        """The incident whose suspect was found by its stacks."""

    def requested(self, rank: int | None, *, native: bool) -> Stacks | None:
        """From a thread of Ray: what all workers do now, or one rank. None: the attempt is over, or begins."""
        if self._loop is None or self._loop.is_closed():
            return None
        work = self.take("requested", rank=rank, native=native)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_REQUEST_S)

    async def take(self, reason: str, *, rank: int | None = None, native: bool = False) -> Stacks:
        """Of all workers, or of one rank; takes some seconds at most, and raises nothing."""
        state = self._state()
        workers = [w for w in state.pool.workers if rank is None or state.group.rank_of(w.index) == rank]
        known = [w for w in workers if self._fleet.knows(w.index)]
        taken = await asyncio.gather(*(self._fleet.stack(w.index, native=native) for w in known))
        ranks = [state.group.rank_of(w.index) if state.group_active else None for w in known]
        samples = [
            (r, s.model_copy(update={"worker_id": w.worker_id})) for r, s, w in zip(ranks, taken, known, strict=True)
        ]
        at = self._clock.time()
        found = cluster(samples, at=at, generation=state.group.generation, reason=reason)
        if reason != STANDSTILL:
            return found
        ips = [w.info.node_ip if w.info is not None else "" for w in known]
        of_group = [(r, ip, s) for (r, s), ip in zip(samples, ips, strict=True) if r is not None]
        return found.model_copy(update={"suspect": whom_do_they_wait_for(of_group)})

    async def links(self) -> Suspect | None:
        """Whose link between nodes is bad now; None: nobody's."""
        state = self._state()
        workers = [w for i in state.group.workers if (w := state.pool.worker(i)) is not None and self._fleet.knows(i)]
        taken = await asyncio.gather(*(self._fleet.stack(w.index) for w in workers))
        return whose_link(
            [
                Ends(rank, worker.info.node_ip, stack.links)
                for worker, stack in zip(workers, taken, strict=True)
                if (rank := state.group.rank_of(worker.index)) is not None and worker.info is not None
            ]
        )

    def consider(self, commands: Iterable[Command]) -> None:
        """After each turn of the machine, before its commands are performed."""
        self._loop, state = asyncio.get_running_loop(), self._state()
        for command in commands:
            match command:
                case Emit(StragglerFound(rank=rank)):
                    self._spawn(self._take_of_slow(f"rank {rank} is slow"))
                case ShowIncident(incident, closed_at=None):
                    self._attach(incident.id, incident.before.generation)
        standstill = (state.group.generation, hangs.newest_progress(state))
        if standstill == self._standstill or self._waiting is not None:
            return
        self._standstill, self._taken = None, None  # it made progress since
        if hangs.standstill(state, self._clock.time()):
            self._standstill = standstill
            self._spawn(self._take_of_standstill(standstill))

    async def _take_of_slow(self, reason: str) -> None:
        self._reporter.event(StacksTaken(stacks=trimmed(await self.take(reason))))

    async def _take_of_standstill(self, standstill: _Standstill) -> None:
        stacks = await self.take(STANDSTILL)
        if standstill != self._standstill:
            return
        self._taken = stacks
        if self._waiting is not None:
            self._show(self._waiting, stacks)

    def _attach(self, incident_id: int, generation: int) -> None:
        """An incident of this generation has begun."""
        if self._standstill is None or self._standstill[0] != generation:
            return
        if self._taken is not None:
            self._show(incident_id, self._taken)
        else:
            self._waiting = incident_id

    def _show(self, incident_id: int, stacks: Stacks) -> None:
        self._standstill, self._taken, self._waiting = None, None, None
        kept = trimmed(stacks)
        self._reporter.keep_stacks(incident_id, kept)
        if kept.suspect is not None:
            self._reporter.keep_suspect(incident_id, kept.suspect)
            self.named = incident_id
        self._reporter.event(StacksTaken(stacks=kept, incident=incident_id))
