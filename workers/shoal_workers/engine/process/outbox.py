"""The outbox of a worker: numbered reports and log lines, kept until the reader acknowledges them.

The training thread and the checkpoint writer add items; the control thread takes them out with a long poll. A report is
never dropped before it is acknowledged, because a lost SavedPart is a lost checkpoint: without a poll they accumulate,
some hundred bytes per step. Log lines are bounded: the oldest are dropped, and the next poll tells how many.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from shoal_workers.contract.messages import LogLine, LogStream, Progress, WorkerPoll
from shoal_workers.contract.worker_reports import WorkerReport


class Outbox:
    """Thread-safe. One sequence numbers reports and logs together, from 1."""

    def __init__(
        self, worker_id: str = "", *, max_logs: int = 5000, on_report: Callable[[WorkerReport], None] | None = None
    ) -> None:
        """`on_report`: called with each report, on the thread that adds it."""
        self._worker_id = worker_id
        self._on_report = on_report
        self._max_logs = max_logs
        self._changed = threading.Condition()
        self._seq = 0
        self._reports: deque[tuple[int, WorkerReport]] = deque()
        self._logs: deque[tuple[int, LogLine]] = deque()
        self._num_dropped = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Nothing will be added any more: polls return at once from now on, even if there is nothing to return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def report(self, report: WorkerReport) -> None:
        """Called from any thread."""
        with self._changed:
            self._seq += 1
            self._reports.append((self._seq, report))
            self._changed.notify_all()
        if self._on_report is not None:
            self._on_report(report)

    def log(self, line: LogLine) -> None:
        """Called from any thread."""
        with self._changed:
            self._seq += 1
            self._logs.append((self._seq, line))
            if len(self._logs) > self._max_logs:
                self._logs.popleft()
                self._num_dropped += 1
            self._changed.notify_all()

    def log_text(self, text: str) -> None:
        """Adds a line of the engine's own to the job's log. Called from any thread."""
        self.log(LogLine(at=time.time(), stream=LogStream.SHOAL, text=text))

    def poll(
        self,
        after: int,
        wait_s: float,
        progress: Progress | Callable[[], Progress],
        *,
        acknowledged: int | None = None,
    ) -> WorkerPoll:
        """Everything newer than `after`: at once if there is anything, else after at most `wait_s` seconds.

        Drops everything numbered `acknowledged` or lower. A reader that has lost its position polls with after=0 and
        gets everything that is still held.

        Args:
            progress: sent with the answer; a callable is called when the answer is ready, not before the wait.
            acknowledged: what the reader has made durable; default: polling for the rest acknowledges it.
        """
        durable = after if acknowledged is None else acknowledged
        with self._changed:
            for queue in (self._reports, self._logs):
                while queue and queue[0][0] <= durable:
                    queue.popleft()
            self._changed.wait_for(lambda: self._seq > after or self._is_closed, timeout=wait_s)
            logs = [line for number, line in self._logs if number > after]
            if self._num_dropped:
                note = f"{self._num_dropped} log lines were dropped here: they came faster than they were read."
                logs.insert(0, LogLine(at=time.time(), stream=LogStream.SHOAL, text=note))
                self._num_dropped = 0
            return WorkerPoll(
                worker_id=self._worker_id,
                seq=self._seq,
                reports=tuple(report for number, report in self._reports if number > after),
                logs=tuple(logs),
                progress=progress if isinstance(progress, Progress) else progress(),
            )
