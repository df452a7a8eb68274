"""Peak memory of this process's tensors, as the kernel counts its pages.

The resident memory of a small model consists mostly of libraries and of freed memory that malloc keeps. Therefore,
while memory is counted, every block of 64 KiB or more is a mapping of its own, which returns to the kernel when it is
freed; and the memory before the model was built is subtracted. Such processes are slow, so times are measured in
others. The memory events of torch's profiler miss memory that threads of gloo free.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_OWN_MAPPING_BYTES = 64 << 10
_NUM_MAPPINGS = 1 << 20
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Counted:
    peak_bytes: int
    """Peak in the window."""
    rest_bytes: int
    """Memory at the end of the window."""


def give_back_freed_memory() -> None:
    """Undoes `keep_freed_memory` of the engine until this process ends. Call it before the first training: memory that
    malloc has kept once is reused, and then it is not a mapping of its own."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, _NUM_MAPPINGS)
    libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _OWN_MAPPING_BYTES)


class TensorPages:
    """Counts from its creation on; the peak counts from `open_window` on. Linux with glibc."""

    def __init__(self) -> None:
        _give_back_free_pages()
        self._before = status_bytes("RssAnon")

    def open_window(self) -> None:
        _give_back_free_pages()
        reset_peak()

    def close(self) -> Counted:
        others = status_bytes("RssFile") + status_bytes("RssShmem")
        peak, rest = status_bytes("VmHWM") - others, status_bytes("RssAnon")
        return Counted(peak - self._before, rest - self._before)


def _give_back_free_pages() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Reset VmHWM of this process."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def status_bytes(field: str) -> int:
    """A field of /proc/self/status that is given in kB: VmHWM, RssAnon, RssFile, RssShmem."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")
