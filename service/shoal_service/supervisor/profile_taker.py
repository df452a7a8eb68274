"""ProfileTaker: passes the request for a profile to the worker of its rank, and its end to the control plane.

Made and called by the executor, on its loop. `core.profiles` decides; nothing here influences the attempt. A restarted
supervisor begins anew with the directive of its journal: the worker ignores a number that it has had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, assert_never

from shoal_service.core.attempt.events import Event, ReportArrived
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.profiles.decide import (
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
from shoal_service.supervisor.config import Directive
from shoal_service.supervisor.protocols import WorkerCallError, WorkerUnavailable, World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_workers.contract.profiling.messages import Profiled, ProfileRequest

_log = logging.getLogger(__name__)
_RETRY_S = 0.25


class ProfileTaker:
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
        self._attempt = state
        self._state = ProfileState()
        self._wanted: ProfileRequest | None = None
        """Of the newest directive."""

    def consider(self, events: Iterable[Event], directive: Directive | None) -> None:
        """After each turn of the machine. Costs nothing while no profile is requested, however large the group is."""
        wanted = directive.profile if directive is not None else None
        if wanted != self._wanted:
            self._wanted = wanted
            self._take(Wanted(wanted))
        reports = [e.item for e in events if isinstance(e, ReportArrived) and isinstance(e.item, Profiled)]
        for item in reports:
            self._take(Reported(item))
        if not reports and self._state.request is not None:
            self._take(Looked())

    def _take(self, event: ProfileEvent) -> None:
        self._state, commands = step(self._state, event, _facts(self._attempt()), self._clock.time())
        for command in commands:
            match command:
                case Send():
                    self._spawn(self._send(command))
                case Report(item):
                    self._reporter.profile(item)
                case _:
                    assert_never(command)

    async def _send(self, order: Send) -> None:
        """Repeated while the worker cannot be reached, and the request goes on."""
        while self._state.request == order.request:
            try:
                await self._fleet.request_profile(order.index, order.generation, order.request)
                return
            except WorkerUnavailable:
                await self._clock.sleep(_RETRY_S)
            except WorkerCallError as error:
                # not an event: the `run` call of this worker fails too, and the request ends with its generation
                _log.info("profile.request_failed", extra={"number": order.request.number, "error": str(error)})
                return


def _facts(state: Attempt) -> GroupFacts:
    return GroupFacts(
        generation=state.group.generation,
        is_running=state.stage is Stage.RUNNING,
        is_active=state.stage in (Stage.RUNNING, Stage.SWITCHING),
        workers=state.group.workers,
        alive=frozenset(worker.index for worker in state.pool.workers),
        step=state.progress.step,
        cause=state.incident.cause.value if state.incident is not None else "",
    )
