"""Keeps freed memory in the worker, so that the next model is built in pages that have been touched already.

The first touch of a page costs 10 to 25 times what copying into it does (the kernel zeroes it; on a virtual machine the
host may have to find it first). glibc returns blocks to the kernel when they are freed, and requests new ones when the
next layout's tensors are created, or the next step's activations. With these settings it keeps them: one arena, which
is never trimmed, and no separate mapping for blocks of less than 4 MiB.

Larger blocks have mappings of their own, which return to the kernel when they are freed. In the arena they cost more
memory than they hold: glibc's aligned allocation needs a little more than what a block of the same size has left
behind, and activations that stay until the backward pass divide the rest. FSDP gathers every unit of a large model into
such blocks, so the arena grew with each unit. New pages of large mappings are huge pages if the process was started
with `glibc.malloc.hugetlb=1`, as Shoal's workers are, and then cost less.

A small model's blocks are all kept, up to the 32 MiB that glibc allows: there is little that they can waste, and its
steps are short, so that a fifth of a step on a CPU was the kernel's work on new pages.

A worker that joins a training group has touched nothing yet, and in its first step all ranks wait for it. So it touches
the memory that the planner expects it to need while it waits for its first generation.

Called by the engine. All of it does nothing on other C libraries than glibc.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
from collections.abc import Callable

import torch

from shoal_workers.machine_limits import available_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OWN_MAPPING_BYTES = 4 << 20
_OWN_MAPPING_BYTES_OF_SMALL = 32 << 20
_SMALL_MODEL_BYTES = 128 << 20
_NEVER_BYTES = 2**31 - 1
_BLOCK_BYTES = 2 << 20
"""Below the threshold, so glibc takes each block from the memory that it keeps."""
_MAX_BYTES = 4 << 30
"""Takes some seconds to touch."""
_CHECKED_EVERY = 16
"""Blocks between two looks at the memory that is left, which take as long as a fifth of a block."""
_SPREAD = 2
"""A freed block does not always have the size that is needed next, so this multiple of the peak is touched."""


def keep_freed_memory(model_bytes: int | None = None) -> None:
    """Holds until the next call. `model_bytes`: the size of the whole model's parameters; None means not known yet."""
    if platform.libc_ver()[0] != "glibc":
        return
    is_small = model_bytes is not None and model_bytes <= _SMALL_MODEL_BYTES
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES_OF_SMALL if is_small else _OWN_MAPPING_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)


def return_freed_memory() -> None:
    """Gives freed memory back to the kernel, once: it will not be needed again. Blocks that are freed later are kept as
    before."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class MemoryToucher:
    """Touches memory on a thread of its own, and keeps it, for a worker that needs `num_bytes` at its peak.

    Used after `keep_freed_memory`. Stops when the machine or the cgroups of this process have half of the memory left
    that they had at first, so that a standby does not displace other processes, nor the workers of a machine each
    other. The worker must do nothing else while it runs.
    """

    def __init__(self, num_bytes: int, left: Callable[[], int] = available_bytes) -> None:
        """`left`: returns the memory that this process may still take, in bytes."""
        self.num_bytes = 0
        """What has been touched, which the worker's own tensors can have."""
        self._left = left
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._touch, args=(num_bytes,), name="shoal-memory", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all of it is touched."""
        self._thread.join()

    def stop(self) -> None:
        """Stops touching, because the memory is needed now. Returns when the thread has ended."""
        self._enough.set()
        self._thread.join()

    def _touch(self, num_bytes: int) -> None:
        if platform.libc_ver()[0] != "glibc":
            return
        least_left = self._left() // 2
        num_blocks = min(_SPREAD * num_bytes, _MAX_BYTES) // _BLOCK_BYTES
        blocks: list[torch.Tensor] = []
        while len(blocks) < num_blocks and not self._enough.is_set():
            if len(blocks) % _CHECKED_EVERY == 0 and self._left() <= least_left:
                return
            block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
            block[:: mmap.PAGESIZE] = 0
            blocks.append(block)
            self.num_bytes += _BLOCK_BYTES
