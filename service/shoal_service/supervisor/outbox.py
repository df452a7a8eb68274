"""Outbox: everything a supervisor has to tell, numbered, until the control plane has said that it is stored.

Events, incidents and checkpoints are never dropped; of series and logs the oldest go first if nobody listens for long.
Touched by the executor's loop (tell) and by Ray's threads (pull).
"""

from __future__ import annotations

import threading
from collections import deque

from shoal_service.reports import AttemptEnd, PendingEvent, PendingLog, SupervisorReports, SuspectedNode
from shoal_service.supervisor.journal import Unacknowledged
from shoal_service.views import CheckpointView, IncidentView, JobStatus, SeriesPoint, WorkerView

_MAX_SERIES = 200_000
_MAX_LOGS = 20_000
_MAX_PER_PULL = 5_000

Durable = PendingEvent | IncidentView | CheckpointView | SuspectedNode


class Outbox:
    """Sequence numbers count every item told; `pull(after)` acknowledges everything up to `after`."""

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
        self._durable: deque[tuple[int, Durable]] = deque((u.seq, u.item) for u in unacknowledged)
        self._series: deque[tuple[int, SeriesPoint]] = deque(maxlen=_MAX_SERIES)
        self._logs: deque[tuple[int, PendingLog]] = deque(maxlen=_MAX_LOGS)
        self._end = end
        self._status: JobStatus | None = None
        self._workers: tuple[WorkerView, ...] = ()
        self._changed = threading.Condition()

    @property
    def seq(self) -> int:
        """Number of the last item told."""
        return self._seq

    @property
    def acknowledged(self) -> int:
        """Everything up to here is stored."""
        return self._acknowledged

    def tell(self, *items: Durable | SeriesPoint | PendingLog) -> None:
        with self._changed:
            for item in items:
                self._seq += 1
                if isinstance(item, SeriesPoint):
                    self._series.append((self._seq, item))
                elif isinstance(item, PendingLog):
                    self._logs.append((self._seq, item))
                else:
                    self._durable.append((self._seq, item))
            self._changed.notify_all()

    def show(self, status: JobStatus, workers: tuple[WorkerView, ...]) -> None:
        """The newest status; not news by itself, it travels with whatever is."""
        with self._changed:
            if self._status is None or status.state != self._status.state:
                self._seq += 1
                self._changed.notify_all()
            self._status, self._workers = status, workers

    def end(self, end: AttemptEnd) -> None:
        with self._changed:
            self._seq += 1
            self._end = end
            self._changed.notify_all()

    def pull(self, after: int, wait_s: float) -> SupervisorReports:
        """Blocks up to `wait_s` seconds for something newer than `after`, and for the first status."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(after), timeout=wait_s)
            self._forget(after)
            return self._news()

    def unacknowledged(self) -> tuple[int, tuple[Unacknowledged, ...], AttemptEnd | None]:
        """For the journal."""
        with self._changed:
            return self._seq, tuple(Unacknowledged(seq=seq, item=item) for seq, item in self._durable), self._end

    def _has_news(self, after: int) -> bool:
        """Without a status there is no news: an empty one would set the job's step and loss back for a moment."""
        return self._end is not None or (self._status is not None and self._seq > after)

    def _forget(self, after: int) -> None:
        self._acknowledged = max(self._acknowledged, after)
        for told in (self._durable, self._series, self._logs):
            while told and told[0][0] <= after:
                told.popleft()

    def _news(self) -> SupervisorReports:
        seq = self._seq
        for told in (self._durable, self._series, self._logs):
            if len(told) > _MAX_PER_PULL:
                seq = min(seq, told[_MAX_PER_PULL - 1][0])
        durable = [item for number, item in self._durable if number <= seq]
        return SupervisorReports(
            attempt=self._attempt,
            seq=seq,
            events=tuple(i for i in durable if isinstance(i, PendingEvent)),
            incidents=tuple({i.id: i for i in durable if isinstance(i, IncidentView)}.values()),
            checkpoints=tuple(
                {(i.step, i.attempt, i.generation): i for i in durable if isinstance(i, CheckpointView)}.values()
            ),
            series=tuple(item for number, item in self._series if number <= seq),
            logs=tuple(item for number, item in self._logs if number <= seq),
            suspects=tuple(i for i in durable if isinstance(i, SuspectedNode)),
            status=self._status or JobStatus(),
            workers=self._workers,
            end=self._end if seq == self._seq else None,
        )
