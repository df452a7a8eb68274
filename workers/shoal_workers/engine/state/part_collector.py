"""Commits checkpoints without a supervisor: ranks announce their parts in a store, rank 0 writes the marker.

Called by standalone.py only. If a part of a checkpoint never arrives, the checkpoint is never committed, and only its
space is lost.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.contract.worker_reports import SavedPart

_PART_TIMEOUT = timedelta(seconds=120)


class PartCollector:
    """On every rank `add` announces a part; on rank 0 a thread waits for the other parts and commits, in step order."""

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
        """This rank's part of a checkpoint is durable."""
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
