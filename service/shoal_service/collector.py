"""Pauses the garbage collector around a short computation that makes many objects and no cycles, as a decision does.

A scheduling decision for 10,000 jobs makes about 80,000 objects. They are freed when it is done, without the collector;
but meanwhile they trigger passes over the whole heap, which take as long as the decision itself.
Called by the control loop, and by bench/schedule, which measures what the control loop pays.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Cycles of any thread stay until afterwards. Not to be nested, and for one thread at a time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
