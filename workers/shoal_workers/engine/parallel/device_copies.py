"""Copies from the host to a GPU for which neither waits: out of pinned memory, and of batches on a stream of their own.

    host      collates batch 2 | pins it | launches micro-batch 2 ...       no wait, so it is ahead of the GPU
    copies            batch 1 ~~~~~   batch 2 ~~~~~
    compute           micro-batch 0 | micro-batch 1 | micro-batch 2         each waits for its own copy alone

A copy out of pageable memory is staged by the driver, which lets the host wait until the GPU has done what was launched
before. On a CPU everything stays as it is. Called by the vote, and by whatever reads batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal_workers.torch_internals import tree_map_only


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values on the device. Work on the current stream sees them."""
    if device.type != "cuda" or not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class BatchCopies:
    """Copies batches for one training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def copy(self, batch: Any) -> Any:
        """A batch with its tensors on the device. Work on the current stream waits for them, and the host does not."""
        if self._device.type != "cuda":
            return batch
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        copying, computing = self._stream, torch.cuda.current_stream(self._device)

        def move(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return tensor.to(self._device)
            with torch.cuda.stream(copying):
                moved = to_device(tensor, self._device)
            moved.record_stream(computing)  # else its memory could be that of a later batch too early
            return moved

        moved = tree_map_only(Tensor, move, batch)
        computing.wait_stream(copying)
        return moved
