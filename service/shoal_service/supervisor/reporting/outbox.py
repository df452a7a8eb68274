"""Outbox: all reports of a supervisor, numbered, until the control plane has acknowledged that they are stored.

Events, incidents, checkpoints and profiles are never dropped. Of series, logs and system metrics the oldest items are
dropped when the service is away for a long time. Called by the executor's loop (add) and by the thread that reports
(pull).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.system_metrics import SystemSample
from shoal_service.reports import PendingEvent, PendingLog, StacksAnswer, SupervisorReports, SuspectedNode
from shoal_service.supervisor.journal import Unacknowledged
from shoal_service.views import CheckpointView, IncidentView, JobStatus, WorkerView
from shoal_workers.contract import WIRE_VERSION, Profiled

_MOST: dict[type, int] = {SeriesPoint: 200_000, PendingLog: 20_000, SystemSample: 360}
"""Most items of a kind that are kept."""
_MAX_PER_PULL = 5_000

Durable = PendingEvent | IncidentView | CheckpointView | SuspectedNode | Profiled


class Outbox:
    """Keeps the reports of a supervisor. Sequence numbers count every item that was added; `pull(after)` acknowledges
    everything up to `after`."""

    def __init__(
        self,
        attempt: int,
        *,
        seq: int = 0,
        unacknowledged: tuple[Unacknowledged, ...] = (),
        end: AttemptEnd | None = None,
    ):
        self._attempt = attempt
        self._seq = seq
        self._acknowledged = 0
        self._durable: deque[tuple[int, Unacknowledged]] = deque((item.seq, item) for item in unacknowledged)
        """The objects stay the same as long as they are here, so the journal writes each of them once."""
        self._bounded: dict[type, deque[tuple[int, Any]]] = {kind: deque(maxlen=most) for kind, most in _MOST.items()}
        self._end = end
        self._stacks: tuple[int, StacksAnswer] | None = None
        self._status: JobStatus | None = None
        self._workers: tuple[WorkerView, ...] = ()
        self._changed = threading.Condition()

    @property
    def seq(self) -> int:
        """Number of the last item added."""
        return self._seq

    @property
    def acknowledged(self) -> int:
        """Number of the last item that the service has stored."""
        return self._acknowledged

    def add(self, *items: Durable | SeriesPoint | PendingLog | SystemSample) -> None:
        with self._changed:
            for item in items:
                self._seq += 1
                if isinstance(item, Durable):
                    self._durable.append((self._seq, Unacknowledged(seq=self._seq, item=item)))
                else:
                    self._bounded[type(item)].append((self._seq, item))
            self._changed.notify_all()

    def set_status(self, status: JobStatus, workers: tuple[WorkerView, ...]) -> None:
        """Keep the newest status. It is sent with the next report; a change of the job's state is a report of its
        own."""
        with self._changed:
            if self._status is None or status.state != self._status.state:
                self._seq += 1
                self._changed.notify_all()
            self._status, self._workers = status, workers

    def add_end(self, end: AttemptEnd) -> None:
        with self._changed:
            self._seq += 1
            self._end = end
            self._changed.notify_all()

    def answer(self, stacks: StacksAnswer) -> None:
        """Keep the answer, in the place of the last one."""
        with self._changed:
            self._seq += 1
            self._stacks = self._seq, stacks
            self._changed.notify_all()

    @property
    def has_status(self) -> bool:
        """True if there is something to report: the first status, or the end."""
        return self._status is not None or self._end is not None

    def pull(self, after: int, wait_s: float) -> SupervisorReports:
        """Wait up to `wait_s` seconds for something newer than `after`, and for the first status; then return what
        there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_reports(after), timeout=wait_s)
            self._drop(after)
            return self._reports()

    def unacknowledged(self) -> tuple[int, tuple[Unacknowledged, ...], AttemptEnd | None]:
        """What the journal stores of the outbox."""
        with self._changed:
            return self._seq, tuple(item for _, item in self._durable), self._end

    def _has_reports(self, after: int) -> bool:
        """Return whether there is something newer. There is nothing before the first status: an empty status would
        reset the job's step and loss for a moment."""
        return self._end is not None or (self._status is not None and self._seq > after)

    def _drop(self, after: int) -> None:
        self._acknowledged = max(self._acknowledged, after)
        for queue in (self._durable, *self._bounded.values()):
            while queue and queue[0][0] <= after:
                queue.popleft()
        if self._stacks is not None and self._stacks[0] <= after:
            self._stacks = None

    def _reports(self) -> SupervisorReports:
        seq = self._seq
        for queue in (self._durable, *self._bounded.values()):
            if len(queue) > _MAX_PER_PULL:
                seq = min(seq, queue[_MAX_PER_PULL - 1][0])
        durable = [item.item for number, item in self._durable if number <= seq]
        bounded = {kind: [i for number, i in queue if number <= seq] for kind, queue in self._bounded.items()}
        return SupervisorReports(
            attempt=self._attempt,
            version=WIRE_VERSION,
            seq=seq,
            events=tuple(i for i in durable if isinstance(i, PendingEvent)),
            incidents=tuple({i.id: i for i in durable if isinstance(i, IncidentView)}.values()),
            checkpoints=tuple(
                {(i.step, i.attempt, i.generation): i for i in durable if isinstance(i, CheckpointView)}.values()
            ),
            series=tuple(bounded[SeriesPoint]),
            logs=tuple(bounded[PendingLog]),
            system=tuple(bounded[SystemSample]),
            suspects=tuple(i for i in durable if isinstance(i, SuspectedNode)),
            profiles=tuple(i for i in durable if isinstance(i, Profiled)),
            stacks=self._stacks[1] if self._stacks is not None and self._stacks[0] <= seq else None,
            status=self._status or JobStatus(),
            workers=self._workers,
            end=self._end if seq == self._seq else None,
        )
