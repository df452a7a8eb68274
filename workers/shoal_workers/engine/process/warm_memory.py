"""Keeps freed memory in the process, so that the next model is made in pages that the last one has touched.

The first touch of a page costs 10 to 25 times what copying into it does (the kernel zeroes it; on a virtual machine the
host may have to find it first). glibc gives blocks back to the kernel when they are freed, and takes new ones when the
next layout's tensors are made, or the next step's activations. With this it keeps them: one arena, which is never
trimmed, and no mapping of its own for blocks of less than 32 MiB, the most that glibc allows.

A process that joins a group which trains has touched nothing yet, and in its first step everybody waits for it. So what
the planner expects it to take is touched while it waits to be called.

Once per training process; elsewhere than on glibc they do nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_THRESHOLD_BYTES = 32 << 20
_NEVER_BYTES = 2**31 - 1
_BLOCK_BYTES = 4 << 20
"""Less than the threshold: of the memory that is kept."""
_MOST_BYTES = 4 << 30
"""Some seconds' worth."""
_SPREAD = 2
"""What is freed is not always of the size that is desired next: so many times what is in use at once is touched."""


def keep_freed_memory() -> None:
    """For the life of this process."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)


class MemoryAtHand:
    """Touches, on a thread of its own, the memory of a process that has so much in use at its peak, and keeps it.

    After `keep_freed_memory`. At most half of what the machine has to spare: a process that is only spare shall not
    push others out. While it touches, the process must be idle otherwise.
    """

    def __init__(self, num_bytes: int) -> None:
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._touch, args=(num_bytes,), name="shoal-memory", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Until all is touched."""
        self._thread.join()

    def stop(self) -> None:
        """The memory is needed now: what is touched by now has to do."""
        self._enough.set()
        self._thread.join()

    def _touch(self, num_bytes: int) -> None:
        if platform.libc_ver()[0] != "glibc":
            return
        num_blocks = min(_SPREAD * num_bytes, _MOST_BYTES, _available_bytes() // 2) // _BLOCK_BYTES
        blocks: list[torch.Tensor] = []
        while len(blocks) < num_blocks and not self._enough.is_set():
            block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
            block[:: mmap.PAGESIZE] = 0
            blocks.append(block)


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
