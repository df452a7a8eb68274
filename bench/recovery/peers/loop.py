"""The plain loop with checkpoints, as both peers run it in each of their processes.

Checkpoints are written with torch.distributed.checkpoint, sharded, every CHECKPOINT_EVERY_STEPS steps. Each peer
decides where they are stored and how a restarted process finds the newest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from measurements.stamps import StampWriter
from plain_loop import PlainLoop
from recovery.workload import CHECKPOINT_EVERY_STEPS
from shoal_workers.contract.checks.spec_errors import parse_spec


class Checkpoints(Protocol):
    def newest(self) -> tuple[Path, int] | None:
        """Directory and completed steps of the newest complete checkpoint, or None."""
        ...

    def save(self, loop: PlainLoop, step: int) -> None: ...


def train(folder: Path, checkpoints: Checkpoints) -> None:
    """Train in one process of an initialised group. `folder` contains spec.yaml and receives the stamps."""
    torch.set_num_threads(1)
    loop = PlainLoop(parse_spec(yaml.safe_load((folder / "spec.yaml").read_text())))
    first = 0
    if found := checkpoints.newest():
        directory, first = found
        _load(loop, directory)
    stamps = StampWriter(folder, dist.get_rank(), dist.get_world_size())
    for step in range(first, loop.num_steps):
        loop.step(step)
        stamps.step_ended(step + 1)
        if (step + 1) % CHECKPOINT_EVERY_STEPS == 0:
            checkpoints.save(loop, step + 1)


def save_state(loop: PlainLoop, directory: Path) -> None:
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)


def _load(loop: PlainLoop, directory: Path) -> None:
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=directory)
    set_state_dict(loop.model, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)
