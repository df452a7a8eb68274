"""A long save, a long restore and a long build report their progress."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.reader import load
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed
from shoal_workers.engine.model.build import noted

_SIZES = (5 << 20, 3 << 20, 1000)
_BYTES = 4 * sum(_SIZES)


def test_a_save_and_a_restore_count_their_bytes(tmp_path: Path) -> None:
    state = {f"t{number}": torch.arange(size, dtype=torch.float32) for number, size in enumerate(_SIZES)}
    directory = str(tmp_path / str(CheckpointName(1, 1, 1)))
    accepted: list[int] = []
    done: list[SavedPart | SaveFailed] = []
    finished = threading.Event()

    def on_done(outcome: SavedPart | SaveFailed) -> None:
        done.append(outcome)
        finished.set()

    writer = CheckpointWriter()
    writer.save(
        state,
        directory=directory,
        rank=0,
        world_size=1,
        generation=1,
        step=1,
        extra={},
        on_done=on_done,
        advanced=accepted.append,
    )
    assert finished.wait(60)
    writer.close()
    [part] = done
    assert isinstance(part, SavedPart)
    assert accepted == sorted(accepted) and accepted[0] == 0 and accepted[-1] >= _BYTES
    assert len(accepted) >= 4, "directory, two blocks of 16 MiB, file"

    write_marker(directory, marker_of([part], job_id="j", attempt=1, now=1.0))
    read: list[int] = []
    load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, directory=directory, advanced=read.append)
    assert len(read) == len(_SIZES) and read == sorted(read) and read[-1] == _BYTES


def test_a_build_counts_the_parameters_that_were_created() -> None:
    notes: list[str] = []
    with noted(notes.append, every_s=0.0):
        nn.Linear(10, 10)
    nn.Linear(10, 10)
    assert notes == ["building the model: 100 parameters so far", "building the model: 110 parameters so far"]
