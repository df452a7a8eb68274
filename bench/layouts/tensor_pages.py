"""Memory of tensors that this process has in use at its peak, as the kernel counts its pages.

Resident memory alone says little about a small model: libraries, and freed memory that malloc keeps for later, are most
of it. So while it is counted every block of 64 KiB or more is a mapping of its own, which goes back to the kernel when
it is freed; and what the process had before the model was built is taken off. That is slow, so times are taken apart.
torch's own counter, the profiler's memory events, misses what threads of gloo let go of.
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
    """The most in the window."""
    rest_bytes: int
    """At its end."""


def give_back_freed_memory() -> None:
    """For the life of this process, against `keep_freed_memory` of the engine. It must not have trained before: what
    malloc has once kept for later it gives out again, and then it is no mapping of its own."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, _NUM_MAPPINGS)
    libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _OWN_MAPPING_BYTES)


class TensorPages:
    """From here on; `open_window` says from when on the peak counts. Linux with glibc."""

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
    """VmHWM of this process starts anew."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def status_bytes(field: str) -> int:
    """A line of /proc/self/status that is in kB: VmHWM, RssAnon, RssFile, RssShmem."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")
