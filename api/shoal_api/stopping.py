"""Stops `shoal serve`: what a signal means, and the lines on the terminal while jobs are saved.

    first signal    every attempt saves at its next step boundary, then the cluster and the server end
    second signal   they end at once; what was not saved is an incident of the next attempt

A server that leaves its cluster running has nothing to save, so it ends at the first signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from shoal_service.core.quantities import count_text
from shoal_service.store import DriveRow, Store
from shoal_service.views import JobView
from shoal_workers.contract import EndReason, JobState

_REPEAT_S = 10.0
"""Seconds after which a line is repeated if nothing has changed, so that the terminal does not look dead."""


class StopRequest:
    """What the user has requested, as two events. Event loop only."""

    def __init__(self, *, saves: bool, begin: Callable[[], None] = lambda: None) -> None:
        """`begin` is called with the first signal, before anything else reacts to it."""
        self._saves = saves
        self._begin = begin
        self.requested = asyncio.Event()
        """Save the jobs, then stop."""
        self.now = asyncio.Event()
        """Stop at once."""

    def signal(self) -> None:
        if not self.requested.is_set():
            self._begin()
        if self.requested.is_set() or not self._saves:
            self.now.set()
        self.requested.set()


class SavingProgress:
    """Prints which jobs are being saved, and the outcome of each."""

    def __init__(self, store: Store, say: Callable[[str], None], monotonic: Callable[[], float]) -> None:
        self._store = store
        self._say = say
        self._monotonic = monotonic
        self._last_lines: dict[str, str] = {}
        self._began_mono = self._said_mono = 0.0

    def show(self, rows: Sequence[DriveRow]) -> None:
        """Print the jobs that still have an attempt; see `ControlLoop.save_and_end`."""
        if not self._began_mono:
            self._began_mono = self._said_mono = self._monotonic()
        if not self._last_lines and rows:
            jobs = count_text(len(rows), "job")
            self._say(
                f"Saving {jobs} before the Ray cluster stops. Ctrl-C again: stop at once, and lose what is not saved."
            )
        for job_id in set(self._last_lines) - {row.id for row in rows}:
            del self._last_lines[job_id]
            self._say_line(describe_outcome(self._store.get_job(job_id)))
        is_due = self._monotonic() - self._said_mono > _REPEAT_S
        for row in rows:
            line = _describe(row)
            if is_due:
                self._say_line(f"{line} (for {self._monotonic() - self._began_mono:.0f} s)")
            elif self._last_lines.get(row.id) != line:
                self._say_line(line)
            self._last_lines[row.id] = line

    def close(self, given_up: Collection[str]) -> None:
        """Print the outcome of the jobs, once the control loop has ended.

        Args:
            given_up: ids of the jobs that were not saved.
        """
        for job_id in sorted({*self._last_lines, *given_up}):
            self._say_line(describe_outcome(self._store.get_job(job_id)))
        self._say("Stopping the Ray cluster.")

    def _say_line(self, line: str) -> None:
        self._said_mono = self._monotonic()
        self._say(f"  {line}")


def describe_outcome(job: JobView) -> str:
    """Describe the state in which the stop has left a job, in one line."""
    status = job.status
    saved = status.checkpoint_step or 0
    if status.state is not JobState.QUEUED:
        return f"{job.id}: {status.state}"
    if status.lost is None and status.reason == EndReason.SERVER_STOPPED:
        if not saved:
            return f"{job.id}: had completed no step, begins under the next server"
        return f"{job.id}: saved at step {saved}, continues there under the next server"
    return f"{job.id}: not saved; step {status.step} was reached, the newest checkpoint is of step {saved}"


def _describe(row: DriveRow) -> str:
    status = row.status
    total = f" of {status.total_steps}" if status.total_steps is not None else ""
    if status.state in (JobState.RUNNING, JobState.PAUSING):
        return f"{row.id}: step {status.step}{total} is complete; saves after the one under way"
    return f"{row.id}: {status.state}, step {status.step}{total}"
