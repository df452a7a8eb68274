"""What islands with real groups have trained: where their rounds landed, and their last weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from shoal_workers.checkpoint.commit import newest_committed
from shoal_workers.checkpoint.reader import load, read_catalogue


def landings(workers: Iterable[Any]) -> dict[int, int]:
    """Return the step in which each round has landed; the newest generation's, if several have said it."""
    landed: dict[int, int] = {}
    for worker in workers:
        if not worker.gone.is_set():
            worker.poll()
        for line in worker.logs:
            if match := re.search(r"round (\d+) has landed in step (\d+)", line.text):
                landed[int(match[1])] = int(match[2])
    return landed


def last_weights(job: Any) -> dict[str, torch.Tensor]:
    """Read the model of the newest checkpoint of a job."""
    newest = newest_committed(job.root)
    assert newest is not None
    tensors, _ = read_catalogue(newest)
    state = {
        name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items() if name.startswith("model.")
    }
    load(state, directory=newest)
    return state


def squares(tensors: Iterable[torch.Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors)
