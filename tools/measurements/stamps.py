"""When each step ended, as the training processes stamp it with the machine's clock.

Every process appends lines to its own file, so a SIGKILL damages at most the last line of one file:

    {"at": ..., "pid": ..., "rank": 0, "world_size": 4, "life": "..."}         a process begins to train
    {"at": ..., "step": 12, "world_size": 4, "life": "..."}                    rank 0 has completed step 12
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StepEnd:
    step: int
    """Optimizer steps completed."""
    at: float
    """Wall-clock time, seconds since the epoch."""
    world_size: int
    life: str
    """Identifies one forming of the group."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The start of a worker's training."""

    rank: int
    pid: int
    at: float
    world_size: int


class StampWriter:
    """One per training process."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._file = (folder / f"stamps-{os.getpid()}.jsonl").open("a", buffering=1)
        self._rank = rank
        self._fields = {"world_size": world_size, "life": f"{os.getpid()}-{time.time():.3f}"}
        self._write(pid=os.getpid(), rank=rank)

    def step_ended(self, step: int) -> None:
        if self._rank == 0:
            self._write(step=step)

    def completed(self, step: int, *, world_size: int, life: str) -> None:
        """Notes a completed step as `step_ended` does, for a group whose size changes while its processes live on."""
        self._write(step=step, world_size=world_size, life=life)

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), **self._fields, **fields}) + "\n")


def read_stamps(folder: Path) -> tuple[list[StepEnd], list[WorkerStart]]:
    """All stamps so far, ordered by time."""
    steps, starts = [], []
    for path in folder.glob("stamps-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                stamp = json.loads(line)
            except json.JSONDecodeError:
                continue  # its writer was killed while writing, or has not finished the line
            if "step" in stamp:
                steps.append(StepEnd(stamp["step"], stamp["at"], stamp["world_size"], stamp["life"]))
            else:
                starts.append(WorkerStart(stamp["rank"], stamp["pid"], stamp["at"], stamp["world_size"]))
    return sorted(steps, key=lambda one: one.at), sorted(starts, key=lambda one: one.at)
