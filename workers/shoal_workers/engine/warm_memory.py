"""Keeps freed memory in the process, so that the next model is made in pages that the last one has touched.

The first touch of a page costs 10 to 25 times what copying into it does (the kernel zeroes it; on a virtual machine the
host may have to find it first). glibc gives blocks back to the kernel when they are freed, and takes new ones when the
next layout's tensors are made, or the next step's activations. With this it keeps them: one arena, which is never
trimmed, and no mapping of its own for blocks of less than 32 MiB, the most that glibc allows.

Called once per training process, early; elsewhere than on glibc it does nothing.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_THRESHOLD_BYTES = 32 << 20
_NEVER_BYTES = 2**31 - 1


def keep_freed_memory() -> None:
    """For the life of this process."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
