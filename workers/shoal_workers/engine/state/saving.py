"""Checkpoint parts of this rank: staged on the training thread, written in the background, reported once durable.

    training thread   | save: staged | training ......................... | the next save waits for the one before
    writer thread                    | written, synced | on_done
    watch thread                     | no byte accepted for timeouts.save_s: not saved, the writer is left behind

Involves no collective. If a periodic save fails or stalls, that is only reported, and while a writer that was left
behind has not returned, each save fails at once: storage that hangs stops no training. A clean end waits for its save,
and the final validation for the commit of the last one. Called by the trainer and the engine.

`PartCollector` commits without a supervisor, for standalone.py: ranks announce their parts in a store, rank 0 writes
the marker. If a part of a checkpoint never arrives, the checkpoint is never committed, and only its space is lost.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed
from shoal_workers.engine.generation_ends import StorageFailed
from shoal_workers.engine.process.outbox import Outbox

_SLICE_S = 0.05
_MIB = 1 << 20


@dataclass(slots=True)
class _Save:
    """One save on its way to the storage. The writer thread sets the last two."""

    name: CheckpointName
    rank: int
    directory: str
    num_bytes: int = 0
    """Accepted by the storage so far."""
    advanced_mono: float = 0.0

    def advanced(self, num_bytes: int) -> None:
        self.num_bytes, self.advanced_mono = num_bytes, time.monotonic()

    def failed(self, error: str, *, is_stalled: bool = False) -> SaveFailed:
        return SaveFailed(
            generation=self.name.generation,
            step=self.name.step,
            rank=self.rank,
            directory=self.directory,
            error=error,
            is_stalled=is_stalled,
        )


def is_save_time(assignment: Assignment, every_s: float | None, saved_mono: float) -> bool:
    """Return whether a checkpoint is due by the clock. Rank 0's decides for all ranks."""
    return every_s is not None and assignment.rank == 0 and time.monotonic() - saved_mono >= every_s


class Saver:
    """One per worker; keeps the writer's warm staging buffers over all generations."""

    def __init__(self, checkpoint_root: str, outbox: Outbox, *, stall_s: float, note: Callable[[str], None]) -> None:
        """`stall_s`: `timeouts.save_s`. `note`: called on the training thread, with the progress that it waits for."""
        self.root = checkpoint_root.rstrip("/")
        """URL of the job's directory."""
        self._outbox = outbox
        self._stall_s = stall_s
        self._note = note
        self._writer = CheckpointWriter()
        self._changed = threading.Condition()
        self._in_flight: _Save | None = None
        self._stalled: _Save | None = None
        """Whether its writer thread was left behind and has not returned yet."""
        self._last: tuple[CheckpointName, SavedPart | SaveFailed] | None = None
        self._committed = (0, 0, "")
        """Generation, step and error of the last commit that was noted."""

    def owns(self, url: str | None) -> bool:
        """Return whether a checkpoint is one of this job, and not of the one that it goes on from."""
        return url is not None and url.rstrip("/").rpartition("/")[0] == self.root

    def save(
        self,
        assignment: Assignment,
        step: int,
        state: dict[str, Tensor],
        extra: dict[str, Any],
        check: Callable[[], None],
    ) -> CheckpointName:
        """Stage this rank's part. When this returns, the live tensors may change again."""
        self._wait_until_idle(check)
        name = CheckpointName(step, assignment.attempt, assignment.generation)
        save = _Save(name, assignment.rank, f"{self.root}/{name}", advanced_mono=time.monotonic())
        with self._changed:
            self._in_flight, stalled = save, self._stalled
        if stalled is not None:
            silent_s = time.monotonic() - stalled.advanced_mono
            error = f"the storage has not answered for {silent_s:.0f} s, since the save of step {stalled.name.step}"
            self._end(save, save.failed(error, is_stalled=True))
            return name
        try:
            self._writer.save(
                state,
                directory=save.directory,
                rank=assignment.rank,
                world_size=assignment.world_size,
                owns_replicated=assignment.layout.owns_replicated(assignment.rank),
                generation=assignment.generation,
                step=step,
                extra=extra,
                on_done=lambda outcome: self._end(save, outcome),
                advanced=save.advanced,
            )
        except OSError as error:
            self._end(save, save.failed(f"{type(error).__name__}: {error}"))
            return name
        threading.Thread(target=self._watch, args=(save,), name=f"shoal-save-watch-{step}", daemon=True).start()
        return name

    def durable_part(self, name: CheckpointName, check: Callable[[], None]) -> SavedPart:
        """Wait until the newest save, which must be `name`, is durable and was reported.

        Raises:
            StorageFailed: it has failed.
        """
        self._wait_until_idle(check)
        assert self._last is not None and self._last[0] == name
        outcome = self._last[1]
        if isinstance(outcome, SaveFailed):
            raise StorageFailed(
                f"the checkpoint of step {name.step} could not be written to {outcome.directory}: {outcome.error}"
            )
        return outcome

    def wait_for_commit(self, name: CheckpointName, timeout_s: float, check: Callable[[], None]) -> None:
        """Waits after the newest save until the supervisor has committed it, at most `timeout_s` seconds.

        Raises:
            StorageFailed: this rank's part or the commit has failed.
        """
        if not timeout_s:
            return
        self.durable_part(name, check)
        self._note(f"waiting for the commit of the checkpoint of step {name.step}")
        until_mono = time.monotonic() + timeout_s
        while (error := self._commit_error(name)) is None:
            check()
            if time.monotonic() >= until_mono:
                self._outbox.log_text(
                    f"the checkpoint of step {name.step} was not committed within {timeout_s:g} s; going on without"
                )
                return
        if error:
            raise StorageFailed(f"the checkpoint of step {name.step} could not be committed: {error}")

    def note_commit(self, generation: int, step: int, error: str) -> None:
        """Control thread: this checkpoint is committed; `error`: why it is not."""
        with self._changed:
            self._committed = (generation, step, error)
            self._changed.notify_all()

    def close(self) -> None:
        """Waits for the last save, unless it stalls."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight is None)
            is_stalled = self._stalled is not None
        if not is_stalled:
            self._writer.close()

    def _commit_error(self, name: CheckpointName) -> str | None:
        """Why `name` could not be committed, empty if it is; None if nothing was noted within a short slice of time."""
        this = (name.generation, name.step)
        with self._changed:
            self._changed.wait_for(lambda: self._committed[:2] == this, timeout=_SLICE_S)
            return self._committed[2] if self._committed[:2] == this else None

    def _wait_until_idle(self, check: Callable[[], None]) -> None:
        """Waits in short slices, because storage that hangs must not hold a fenced rank. Ends when the save stalls."""
        noted = -1
        while True:
            check()
            with self._changed:
                if self._changed.wait_for(lambda: self._in_flight is None, timeout=_SLICE_S):
                    return
                save = self._in_flight
            if save is not None and save.num_bytes != noted:
                noted = save.num_bytes
                self._note(f"writing the checkpoint of step {save.name.step}: {noted / _MIB:,.0f} MiB so far")

    def _watch(self, save: _Save) -> None:
        """Runs on a thread of its own: gives the save up once the storage has accepted nothing for too long."""
        error = (
            f"the storage accepted nothing for {self._stall_s:g} s (timeouts.save_s); not saved, and training goes on. "
            "Check checkpoint.url; a slow storage needs a larger timeouts.save_s"
        )
        with self._changed:
            while self._in_flight is save:
                left_s = save.advanced_mono + self._stall_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                # Under the lock, which is reentrant: if the writer returns at this moment, its own `_end` comes before
                # all of this or after it.
                self._stalled = save
                self._writer.abandon()
                self._end(save, save.failed(error, is_stalled=True))

    def _end(self, save: _Save, outcome: SavedPart | SaveFailed) -> None:
        """Runs on the thread that knows the outcome of a save: the writer's or, if that stalls, first the watch's."""
        with self._changed:
            if self._in_flight is save:
                # Reported before a waiting thread goes on, because the worker may end right after its wait.
                self._outbox.report(outcome)
                self._last = (save.name, outcome)
                self._in_flight = None
                self._changed.notify_all()
            elif self._stalled is save:
                self._stalled = None
                silent_s = time.monotonic() - save.advanced_mono
                self._outbox.log_text(
                    f"the storage answers again, {silent_s:.0f} s after it stalled in the save of step {save.name.step}"
                )


_PART_TIMEOUT = timedelta(seconds=120)


class PartCollector:
    """Announces parts with `add` on every rank; on rank 0 a thread waits for the other parts and commits, in step
    order."""

    def __init__(
        self, job_id: str, attempt: int, rank: int, store: Store, *, on_commit: Callable[[int, str], None]
    ) -> None:
        """`on_commit`: called on rank 0 with the step of each checkpoint, and why it was not committed."""
        self._job_id = job_id
        self._attempt = attempt
        self._rank = rank
        self._store = store
        self._on_commit = on_commit
        self._num_committed = 0
        self._own: queue.Queue[SavedPart | None] = queue.Queue()
        self._thread = threading.Thread(target=self._commit_all, name="shoal-commit", daemon=True)
        if rank == 0:
            self._thread.start()

    def add(self, part: SavedPart) -> None:
        """Announces this rank's part of a checkpoint, which is durable."""
        self._store.set(_key(part.step, self._rank), part.model_dump_json())
        if self._rank == 0:
            self._own.put(part)

    def close(self) -> int:
        """Wait for pending commits. Returns the number of committed checkpoints on rank 0, and 0 on other ranks."""
        if self._rank == 0:
            self._own.put(None)
            self._thread.join()
        return self._num_committed

    def _commit_all(self) -> None:
        while (own := self._own.get()) is not None:
            keys = [_key(own.step, rank) for rank in range(own.world_size)]
            try:
                self._store.wait(keys, _PART_TIMEOUT)
                parts = [SavedPart.model_validate_json(self._store.get(key)) for key in keys]
                marker = marker_of(parts, job_id=self._job_id, attempt=self._attempt, now=time.time())
                write_marker(own.directory, marker)
                self._num_committed += 1
                self._on_commit(own.step, "")
            except (DistError, OSError) as error:
                sys.stderr.write(f"the checkpoint of step {own.step} was not committed: {error}\n")
                self._on_commit(own.step, str(error))


def _key(step: int, rank: int) -> str:
    return f"part/{step}/{rank}"
