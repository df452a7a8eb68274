"""Keeps freed memory in the process, so that the next model is made in pages that the last one has touched.

The first touch of a page costs 10 to 25 times what copying into it does (the kernel zeroes it; on a virtual machine the
host may have to find it first). glibc gives blocks back to the kernel when they are freed, and takes new ones when the
next layout's tensors are made, or the next step's activations. With this it keeps them: one arena, which is never
trimmed, and no mapping of its own for blocks of less than 32 MiB, the most that glibc allows.

A process that joins a group which trains has touched nothing yet, and in its first step everybody waits for it. So what
the planner expects it to take is touched while it gets ready.

Called once per training process, early; elsewhere than on glibc they do nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_THRESHOLD_BYTES = 32 << 20
_NEVER_BYTES = 2**31 - 1
_BLOCK_BYTES = 16 << 20
"""Less than the threshold: of the memory that is kept."""
_MOST_BYTES = 4 << 30
"""Some seconds' worth."""
_SPREAD = 2
"""What is freed is not always of the size that is wanted next: so many times what is in use at once is touched."""


def keep_freed_memory() -> None:
    """For the life of this process."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)


def have_at_hand(num_bytes: int) -> None:
    """Touch the memory of a process that has so much in use at its peak, and keep it; after `keep_freed_memory`.

    At most half of what the machine has to spare: a process that is only spare shall not push others out.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    num_blocks = min(_SPREAD * num_bytes, _MOST_BYTES, _available_bytes() // 2) // _BLOCK_BYTES
    blocks = [torch.empty(_BLOCK_BYTES, dtype=torch.uint8) for _ in range(num_blocks)]
    for block in blocks:
        block[:: mmap.PAGESIZE] = 0


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
