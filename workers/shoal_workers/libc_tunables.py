"""The settings of glibc with which processes that train on a CPU start; glibc reads them only at the start.

Set for the workers of the service, and for runs under torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
_COPY_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""A snapshot consists of some hundred copies of this size or more, which are not read soon. Copying past the cache
takes less time."""
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""New memory of large blocks comes in huge pages if the kernel has some, so that touching it costs little. glibc from
2.35 on; others ignore it."""


def choose_tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to this environment; nothing if it has tunables already."""
    return {} if VARIABLE in environment else {VARIABLE: f"{_COPY_PAST_THE_CACHE}:{_HUGE_PAGES}"}
