"""SupervisorContext: what all worker clients of an attempt share. Made by the executor; decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal_service.clock import Clock
from shoal_service.core.attempt.events import Event, WorkerUnreachable
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.supervisor.protocols import Fleet, UntilGone
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_service.supervisor.reporting.reporter import Reporter

if TYPE_CHECKING:
    from shoal_service.supervisor.workers.polling.worker_polling import WorkerPolling

_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class SupervisorContext:
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
    """End the worker of this index."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """For work that must continue after the client was closed."""
    raylet: Callable[[str], tuple[str, int] | None]
    """Address and port of a node's raylet, by node id; None: unknown."""
    polled: dict[int, WorkerPolling] = field(default_factory=dict)
    """All workers that are polled now, by index: each adds and removes itself. The pool of agents takes them over."""


async def unreachable(context: SupervisorContext, index: int) -> None:
    """A call to the worker has failed, and may succeed later: waits until it is due again."""
    context.post(WorkerUnreachable(index))
    await context.clock.sleep(_RETRY_S)
