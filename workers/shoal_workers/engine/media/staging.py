"""Memory into which the training thread copies what is logged: buffers that were touched before, used again and again.

A new allocation of this size costs a page fault for each 4 KiB that is written. The recorder's thread makes the first
buffers and returns each one when what is in it has been stored; `take` never waits, and makes a new one if none is
free. Small copies get memory of their own, which the allocator has at hand.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from shoal_workers.contract.media import MAX_COPIED_BYTES, MAX_SAMPLE

ALIGNMENT_BYTES = 64
BUFFER_BYTES = MAX_COPIED_BYTES + 8 * MAX_SAMPLE + (64 << 10)
"""Images and histograms of one call, with what alignment wastes."""
_SMALL_BYTES = 64 << 10
_NUM_READY = 2
_MAX_FREE = 8


class Staging:
    """`take` on the training thread, the rest on the recorder's. Each operation on the deque is atomic."""

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque()

    def make_ready(self) -> None:
        while len(self._free) < _NUM_READY:
            self._free.append(torch.zeros(BUFFER_BYTES, dtype=torch.uint8).fill_(1))

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of bytes of at least this length."""
        if num_bytes <= _SMALL_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        try:
            return self._free.pop()
        except IndexError:
            return torch.empty(max(num_bytes, BUFFER_BYTES), dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        if len(buffer) == BUFFER_BYTES and len(self._free) < _MAX_FREE:
            self._free.append(buffer)
