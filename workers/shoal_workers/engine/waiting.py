"""How long the training thread waits for other ranks: the difference between a slow rank and one that is kept waiting.

torch's Python collectives end in `Work.wait`; it is timed there, once per process, for every collective of FSDP2 and
our own. On a GPU `wait` only orders streams and takes no time, so compute and wait cannot be told apart there this way,
and `waited_s` stays near zero. Read by the training thread around each step.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from torch._C._distributed_c10d import Work

_own = threading.local()
_is_timing = False


def start_timing() -> None:
    """Idempotent; once per process, before the first group is made."""
    global _is_timing
    if _is_timing:
        return
    _is_timing = True
    plain_wait = Work.wait

    def timed_wait(self: Work, *arguments: Any, **named: Any) -> bool:
        start = time.perf_counter()
        try:
            return bool(plain_wait(self, *arguments, **named))
        finally:
            _own.waited_s = waited_s() + time.perf_counter() - start

    Work.wait = timed_wait  # type: ignore[method-assign]


def waited_s() -> float:
    """Seconds that the calling thread has ever waited in collectives."""
    return float(getattr(_own, "waited_s", 0.0))
