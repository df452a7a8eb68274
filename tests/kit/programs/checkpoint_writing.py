"""Program of a process that saves under failures: `python checkpoint_writing.py limited|stuck ROOT`."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import torch

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.index import payload_name
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed


def save(writer: CheckpointWriter, values: torch.Tensor, directory: Path, step: int) -> list[SavedPart | SaveFailed]:
    reported: list[SavedPart | SaveFailed] = []
    writer.save(
        {"w": values},
        directory=str(directory),
        rank=0,
        world_size=1,
        generation=1,
        step=step,
        extra={},
        on_done=reported.append,
    )
    return reported


def limited(root: Path) -> None:
    """A full disk: no file may grow beyond 1 MiB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    writer = CheckpointWriter()
    too_big = save(writer, torch.zeros(1 << 20), root / "big", 1)
    fits = save(writer, torch.zeros(100_000), root / "small", 2)
    writer.close()
    print(*(type(outcome).__name__ for outcome in too_big + fits))


def stuck(root: Path) -> None:
    """Commit step 1; step 2 is written into a pipe of 64 KiB, so it blocks in the middle of the payload."""
    writer = CheckpointWriter()
    first = save(writer, torch.ones(500_000), root / str(CheckpointName(1, 1, 1)), 1)
    writer.wait()
    parts = [part for part in first if isinstance(part, SavedPart)]
    write_marker(parts[0].directory, marker_of(parts, job_id="job", attempt=1, now=0.0))
    second = root / str(CheckpointName(2, 1, 1))
    second.mkdir()
    os.mkfifo(second / f"{payload_name(0)}.writing")
    save(writer, torch.full((500_000,), 2.0), second, 2)
    print("committed", flush=True)
    writer.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"limited": limited, "stuck": stuck}[sys.argv[1]](Path(sys.argv[2]))
