"""Checkpoint parts of this rank: staged on the training thread, written in the background, reported once durable.

Involves no collective. If a periodic save fails, that is only reported. A clean end waits for its save, and `outcome`
returns the result. Called by the trainer and the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed
from shoal_workers.engine.process.outbox import Outbox

_SLICE_S = 0.05


class Saver:
    """One per worker; keeps the writer's warm staging buffers over all generations."""

    def __init__(self, checkpoint_root: str, outbox: Outbox) -> None:
        self._root = checkpoint_root.rstrip("/")
        self._outbox = outbox
        self._writer = CheckpointWriter()
        self._changed = threading.Condition()
        self._in_flight: CheckpointName | None = None
        self._last: tuple[CheckpointName, SavedPart | SaveFailed] | None = None

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
        directory = f"{self._root}/{name}"
        with self._changed:
            self._in_flight = name
        try:
            self._writer.save(
                state,
                directory=directory,
                rank=assignment.rank,
                world_size=assignment.world_size,
                owns_replicated=assignment.layout.owns_replicated(assignment.rank),
                generation=assignment.generation,
                step=step,
                extra=extra,
                on_done=lambda outcome: self._done(name, outcome),
            )
        except OSError as error:
            self._done(
                name,
                SaveFailed(
                    generation=assignment.generation,
                    step=step,
                    rank=assignment.rank,
                    directory=directory,
                    error=f"{type(error).__name__}: {error}",
                ),
            )
        return name

    def outcome(self, name: CheckpointName, check: Callable[[], None]) -> SavedPart | SaveFailed:
        """Wait until the newest save, which must be `name`, is durable or has failed, and was reported."""
        self._wait_until_idle(check)
        assert self._last is not None and self._last[0] == name
        return self._last[1]

    def close(self) -> None:
        self._writer.close()

    def _wait_until_idle(self, check: Callable[[], None]) -> None:
        """Waits in short slices, because storage that hangs must not hold a fenced rank."""
        while True:
            check()
            with self._changed:
                if self._changed.wait_for(lambda: self._in_flight is None, timeout=_SLICE_S):
                    return

    def _done(self, name: CheckpointName, outcome: SavedPart | SaveFailed) -> None:
        """Called by the writer's thread, once per save."""
        self._outbox.report(outcome)
        with self._changed:
            self._last = (name, outcome)
            self._in_flight = None
            self._changed.notify_all()
