"""Inspection: what looks into the workers of an attempt, or talks to them, without deciding anything about it: stacks,
suspects, profiles, the metrics hook.

Made by the executor, which shows it every turn of the machine. `stacks` is also called by the supervisor, on request.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from shoal_service.core.attempt.commands import Command, End
from shoal_service.core.attempt.events import Event
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.culprit_finder import CulpritFinder
from shoal_service.supervisor.metrics_hook.forwarder import MetricsForwarder
from shoal_service.supervisor.profile_taker import ProfileTaker
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.supervisor.stack_taker import StackTaker


class Inspection:
    """See StackTaker for the arguments."""

    def __init__(
        self,
        config: SupervisorConfig,
        world: World,
        reporter: Reporter,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        state: Callable[[], Attempt],
    ) -> None:
        self.stacks = StackTaker(world, reporter, spawn, state)
        self._culprits = CulpritFinder(self.stacks, reporter, spawn, state)
        self._profiles = ProfileTaker(world, reporter, spawn, state)
        self._metrics = MetricsForwarder(config.spec.metrics.hook, world, reporter, spawn, state)

    def consider(self, events: Sequence[Event], commands: Iterable[Command], directive: Directive | None) -> None:
        """After each turn of the machine, before its commands are performed."""
        self.stacks.consider(commands)
        self._culprits.consider(events)
        self._profiles.consider(events, directive)
        self._metrics.consider()

    async def finish(self, end: End | None) -> None:
        """Before the workers are released. None: the attempt goes on in another supervisor."""
        if end is not None:
            await self._metrics.finish(end.end.reason)
