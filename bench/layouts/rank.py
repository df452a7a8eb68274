"""One rank of the benchmarks: a process that trains one assigned layout after the other, and counts memory or time.

    step 1            creates the optimizer's state and everything else that is created once
    step 2            memory is counted, if `counts`
    steps 3 .. N      timed, if not `counts`

The engine is driven without Ray, as run.py drives it. Nothing interrupts it, so one thread suffices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from layouts.tensor_pages import Counted, TensorPages, give_back_freed_memory
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.messages import Assignment, ExitKind, Phase
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox

_COUNTED_STEP = 2
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class RankRun:
    """The figures of one rank in one generation."""

    rank: int
    step_s: tuple[float, ...]
    """Seconds of the timed steps; rank 0 only."""
    losses: tuple[float, ...]
    """Losses of all steps; rank 0 only."""
    counted: Counted
    error: str = ""


def serve(connection: Connection, spec: dict[str, Any], root: str, *, counts: bool) -> None:
    """Main function of the process: sends its store's port, then answers each Assignment with a RankRun, until None."""
    torch.set_num_threads(1)
    rank = _Rank(spec, root, counts=counts)
    if counts:
        give_back_freed_memory()
    connection.send(rank.store_port)
    while (assignment := connection.recv()) is not None:
        connection.send(rank.train(assignment))
    rank.close()


class _Rank:
    def __init__(self, spec: dict[str, Any], root: str, *, counts: bool) -> None:
        self._counts = counts
        self._seq = 0
        self._pages: TensorPages | None = None
        self._is_open = False
        self._counted = Counted(0, 0)
        self._outbox = Outbox(f"rank-{os.getpid()}")
        self._engine = Engine(
            parse_spec(spec),
            checkpoint_root=root,
            outbox=self._outbox,
            store=StoreServer("127.0.0.1", root),
            on_phase=self._enter,
        )
        self._engine.prepare()

    @property
    def store_port(self) -> int:
        return self._engine.store_port

    def train(self, assignment: Assignment) -> RankRun:
        ended = self._engine.run(assignment)
        poll = self._outbox.poll(self._seq, 0.0, lambda: self._engine.progress)
        self._seq = poll.seq
        steps = [item for item in poll.reports if isinstance(item, StepReport)]
        error = "" if ended.kind is ExitKind.FINISHED else (ended.error.traceback if ended.error else str(ended.kind))
        return RankRun(
            rank=assignment.rank,
            step_s=tuple(one.step_s for one in steps if one.step > WARM_UP_STEPS),
            losses=tuple(one.loss for one in steps if one.loss is not None),
            counted=self._counted,
            error=error,
        )

    def close(self) -> None:
        self._engine.close()

    def _enter(self, phase: Phase, step: int) -> None:
        if not self._counts:
            return
        if phase is Phase.FORMING:  # the model of the previous generation has been freed
            self._pages, self._is_open = TensorPages(), False
        if self._pages is None or phase is not Phase.FORWARD:
            return
        if step == _COUNTED_STEP - 1 and not self._is_open:
            self._is_open = True
            self._pages.open_window()
        if step == _COUNTED_STEP:
            self._counted = self._pages.close()
            self._pages = None
