"""WorkerPolling: polls one worker until it ends, and acknowledges what is stored.

Made and run by the worker's client. While the agent of the worker's node polls it, this only keeps the positions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.events import ProgressReported, ReportArrived
from shoal_service.core.attempt.large_groups import poll_wait_s
from shoal_service.supervisor.protocols import WorkerCallError, WorkerUnavailable
from shoal_service.supervisor.workers.context import SupervisorContext, unreachable
from shoal_workers.contract.messages import Phase, PollRequest, Progress, WorkerPoll

_HANG_POLL_WAIT_S = 0.25
"""How long a poll waits once the worker's progress counter has stood still for half of the hang limit."""


class WorkerPolling:
    """Used on the executor's loop only."""

    def __init__(self, index: int, worker_id: str, context: SupervisorContext) -> None:
        self.index = index
        self.worker_id = worker_id
        self.node_id = ""
        """Set once the worker is warm."""
        self._context = context
        self._received_seq = 0
        """Number of the last report or log line that was received."""
        self._acknowledged = 0
        self._stored_after: deque[tuple[int, int, int]] = deque()
        """For each poll: its number, and those of the outbox and of the metrics hook once all of it was in them."""
        self._wait_s = self._poll_wait_s()
        self._call: asyncio.Future[WorkerPoll] | None = None
        """The direct poll in flight."""
        self._released: asyncio.Future[None] | None = None
        """Set while an agent polls the worker; done when it is polled directly again."""
        self._has_failed = False
        """Its agent could not poll it; it has not answered a direct poll since."""

    async def run(self) -> None:
        """Long-polls the worker for reports, logs and progress. Raises WorkerCallError when the worker has ended.

        The worker keeps a report until the control plane has stored it and the metrics hook has logged it, so nothing
        is lost if the supervisor dies before. What was stored and not acknowledged yet is reported again: steps
        overwrite themselves, and some log lines appear twice.
        """
        polled = self._context.polled
        polled[self.index] = self
        try:
            while True:
                try:
                    poll = await self._poll_directly()
                except WorkerUnavailable:
                    await unreachable(self._context, self.index)
                    continue
                if poll is not None:
                    self._has_failed = False
                    self.receive(poll)
                    await self._context.settled()
                    self.handled()
        finally:
            if polled.get(self.index) is self:
                del polled[self.index]

    async def _poll_directly(self) -> WorkerPoll | None:
        """None: an agent has polled the worker meanwhile, and does so no longer."""
        request = self.request()
        fleet = self._context.fleet
        call = self._call = asyncio.ensure_future(
            fleet.poll(self.index, request.after, request.acknowledged, request.wait_s)
        )
        try:
            await asyncio.wait({call})
            if self._released is None:
                return call.result()
            await self._released
            self._wait_s = 0.0  # its last answer may be old
            return None
        finally:
            call.cancel()
            self._call = self._released = None

    def take_over(self) -> bool:
        """An agent polls the worker from now on, until `release`. False: not now, an answer is being handled, or the
        last try has failed."""
        if self._released is not None:
            return not self._released.done()
        if self._call is None or self._call.done() or self._has_failed:
            return False
        self._released = asyncio.get_running_loop().create_future()
        self._call.cancel()
        return True

    @property
    def is_taken_over(self) -> bool:
        return self._released is not None and not self._released.done()

    def fail(self) -> None:
        """The agent cannot poll the worker: poll it directly, which says why, and on until it answers."""
        self._has_failed = True
        self.release()

    def release(self) -> None:
        """Poll directly again, at once. Nothing happens if no agent polls the worker."""
        if self._released is not None and not self._released.done():
            self._released.set_result(None)

    def request(self) -> PollRequest:
        """The next poll."""
        outbox, backlog = self._context.outbox, self._context.reporter.backlog
        stored = self._stored_after
        while stored and stored[0][1] <= outbox.acknowledged and stored[0][2] <= backlog.settled:
            self._acknowledged, *_ = stored.popleft()
        return PollRequest(
            worker_id=self.worker_id, after=self._received_seq, acknowledged=self._acknowledged, wait_s=self._wait_s
        )

    def receive(self, poll: WorkerPoll) -> None:
        """An answer becomes events of the machine."""
        self._record(poll)
        self._wait_s = _HANG_POLL_WAIT_S if self._may_hang_soon(poll.progress) else self._poll_wait_s()
        for item in poll.reports:
            self._context.post(ReportArrived(self.index, item))
        self._context.post(ProgressReported(self.index, poll.progress))

    def handled(self) -> None:
        """The machine has handled the last answer, so all of it is in the outbox."""
        outbox, backlog = self._context.outbox, self._context.reporter.backlog
        if not self._stored_after or self._stored_after[-1][0] != self._received_seq:
            self._stored_after.append((self._received_seq, outbox.seq, backlog.added))

    async def collect_last(self, limit_s: float) -> None:
        """At the attempt's end: one more poll, for the worker's last reports and output."""
        with contextlib.suppress(WorkerCallError, TimeoutError):
            call = self._context.fleet.poll(self.index, self._received_seq, self._received_seq, 0.0)
            poll = await self._context.clock.wait_for(call, limit_s)
            self._record(poll)
            for item in poll.reports:
                self._context.reporter.record_report(item, self._context.state())

    def _record(self, poll: WorkerPoll) -> None:
        self._received_seq = poll.seq
        self._context.reporter.record_poll(self.index, poll, self._context.state())

    def _poll_wait_s(self) -> float:
        """A poll returns as soon as the worker has something to report, and after this time in any case."""
        return poll_wait_s(len(self._context.state().pool.workers))

    def _may_hang_soon(self, progress: Progress) -> bool:
        if progress.phase in (Phase.IDLE, Phase.PREPARING):
            return False
        state = self._context.state()
        at_least = state.target.spec.health.hang_floor_s / 2  # the threshold itself takes a look at every rank
        return progress.stalled_s >= at_least and progress.stalled_s >= hangs.threshold_s(state) / 2
