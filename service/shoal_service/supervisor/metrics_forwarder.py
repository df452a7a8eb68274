"""MetricsForwarder: passes the points of a job to its metrics hook, which runs beside one of the workers.

    reporter --> MetricBacklog --batch--> worker's HookProcess --> the user's hook
                      ^---------------- logged up to -------'

The worker stays the same while it is there, so there is one hook at a time. Made by Inspection, on the executor's loop.
It decides nothing about the attempt, and delays nothing but its end, by `_LAST_S` at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.endings import ENDINGS, Retry
from shoal_service.core.events.service import MetricsHookFailed
from shoal_service.supervisor.protocols import WorkerCallError, World
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_workers.contract.job import EndReason, JobState
from shoal_workers.contract.messages import MetricsBatch, MetricsProgress

_log = logging.getLogger(__name__)
_PACE_S = 0.5
"""Pause between two batches."""
_LAST_PACE_S = 0.1
_LAST_S = 10.0
"""How long the end of an attempt waits for the hook, if it does not fail."""
_CALL_S = 10.0
_MOST_AT_ONCE = 1000


class MetricsForwarder:
    def __init__(
        self,
        hook: str | None,
        world: World,
        reporter: Reporter,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        state: Callable[[], Attempt],
    ) -> None:
        """
        Args:
            hook: `metrics.hook` of the spec.
            spawn: runs work on the executor's loop until the attempt ends.
            state: the current one.
        """
        self._hook = hook
        self._fleet = world.fleet
        self._clock = world.clock
        self._reporter = reporter
        self._backlog = reporter.backlog
        self._spawn = spawn
        self._state = state
        self._index: int | None = None
        """The worker beside which the hook runs."""
        self._error = ""
        """Error of the last answer; empty: there was none."""
        self._is_started = False

    def consider(self) -> None:
        """Called after each turn of the machine. Costs nothing without a hook."""
        if self._hook is not None and not self._is_started and self._backlog.num_waiting:
            self._is_started = True
            self._spawn(self._forward_forever())

    async def finish(self, reason: EndReason) -> None:
        """Sends the last points and the end of the attempt to the hook. Called before the workers are released."""
        if self._hook is None or self._backlog.added == 0:
            return
        end, until = end_words(reason), self._clock.monotonic() + _LAST_S
        why = f"it did not log the last points within {_LAST_S:.0f} s of the end"
        while self._clock.monotonic() < until:
            progress = await self._forward(end)
            if progress is None or progress.error:
                why = progress.error if progress is not None else "no worker is left to run it"
                break
            if progress.has_ended:
                return
            await self._clock.sleep(_LAST_PACE_S)
        self._failed(why)

    async def _forward_forever(self) -> None:
        while True:
            if self._backlog.num_waiting:
                await self._forward("")
            await self._clock.sleep(_PACE_S)

    async def _forward(self, end: str) -> MetricsProgress | None:
        """Sends one batch. None if no worker could take it."""
        index = self._worker()
        if index is None:
            return None
        points = self._backlog.first(_MOST_AT_ONCE)
        batch = MetricsBatch(points=points, end="" if len(points) < self._backlog.num_waiting else end)
        try:
            progress = await self._clock.wait_for(self._fleet.forward_metrics(index, batch), _CALL_S)
        except (WorkerCallError, TimeoutError) as error:
            _log.info("metrics_hook.unreachable", extra={"worker": index, "error": str(error)})
            return MetricsProgress()
        self._backlog.logged(progress.logged)
        self._note(progress.error)
        return progress

    def _worker(self) -> int | None:
        """The worker beside which the hook runs: the same as before while it is there, otherwise rank 0 of the
        group."""
        if self._index is None or not self._fleet.knows(self._index):
            ranks = self._state().group.ranks
            alive = [index for index in sorted(ranks, key=lambda index: ranks[index]) if self._fleet.knows(index)]
            self._index = alive[0] if alive else None
        return self._index

    def _note(self, error: str) -> None:
        if error and error != self._error:
            self._failed(error)
        self._error = error

    def _failed(self, error: str) -> None:
        event = MetricsHookFailed(
            hook=self._hook or "",
            message=error,
            num_waiting=self._backlog.num_waiting,
            num_dropped=self._backlog.num_dropped,
        )
        self._reporter.event(event)
        self._error = error


def end_words(reason: EndReason) -> str:
    """The word for `Hook.end`. The control plane decides whether a job goes on after an attempt that failed."""
    ending = ENDINGS[reason]
    if ending.retry is Retry.FREE:
        return JobState.QUEUED.value.lower()
    return ending.state.value.lower()
