"""Processes that train one layout after the other. Each run is a new generation that starts from the seed.

The processes are forked from a server that has only imported torch: a fork of a process with threads sometimes hangs.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from layouts.rank import RankRun, serve
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment

_PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class LayoutRun:
    """The cost of a layout, over all ranks."""

    step_s: float
    """Median of the timed steps."""
    peak_bytes: int
    """Peak of the rank with the largest one."""
    rest_bytes: int
    """Memory between two steps, of the rank with the most."""
    losses: tuple[float, ...]


class WorkerPool:
    """Call `close` in a `finally`. `counts`: the runs count memory; otherwise they measure time."""

    def __init__(self, spec: dict[str, Any], folder: Path, *, counts: bool) -> None:
        self._counts = counts
        self._spec = spec
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["layouts.rank"])
        self._ranks: list[tuple[Any, Connection, int]] = []
        self._generation = 0

    @property
    def num_ranks(self) -> int:
        """Number of live processes."""
        return len(self._ranks)

    def train(self, layout: Layout) -> LayoutRun:
        """Trains from the seed to the last step. Raises RuntimeError with the traceback of the first rank that
        failed."""
        self._start(layout.world_size - len(self._ranks))
        self._generation += 1
        ranks = self._ranks[: layout.world_size]
        for rank, (_, connection, _) in enumerate(ranks):
            connection.send(
                Assignment(
                    job_id="bench",
                    attempt=1,
                    generation=self._generation,
                    rank=rank,
                    layout=layout,
                    store_host="127.0.0.1",
                    store_port=ranks[0][2],
                    restore_from=None,
                    collective_timeout_s=60.0,
                )
            )
        runs: list[RankRun] = [self._answer(connection) for _, connection, _ in ranks]
        shutil.rmtree(self._folder, ignore_errors=True)  # the last step's checkpoint
        if errors := [run.error for run in runs if run.error]:
            raise RuntimeError(f"{layout.describe()}: {errors[0]}")
        return LayoutRun(
            step_s=statistics.median(runs[0].step_s) if runs[0].step_s else 0.0,
            peak_bytes=max(run.counted.peak_bytes for run in runs),
            rest_bytes=max(run.counted.rest_bytes for run in runs),
            losses=runs[0].losses,
        )

    def close(self) -> None:
        for process, connection, _ in self._ranks:
            try:
                connection.send(None)
            except OSError:
                pass  # the process has died, which was reported before
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks.clear()

    def _start(self, missing: int) -> None:
        fresh = []
        for _ in range(missing):
            ours, theirs = multiprocessing.Pipe()
            process = self._context.Process(
                target=serve,
                args=(theirs, self._spec, str(self._folder)),
                kwargs={"counts": self._counts},
                daemon=True,
            )
            process.start()
            theirs.close()
            fresh.append((process, ours))
        self._ranks += [(process, connection, self._answer(connection)) for process, connection in fresh]

    @staticmethod
    def _answer(connection: Connection) -> Any:
        if not connection.poll(_PATIENCE_S):
            raise RuntimeError(f"a rank has not answered within {_PATIENCE_S:.0f} s")
        return connection.recv()
