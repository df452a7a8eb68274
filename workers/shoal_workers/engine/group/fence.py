"""What the control thread has ordered: which generations are over, and which ones shall yield.

The fence is three integers that only grow. Generations only grow too, so a late or repeated order does no harm. Reading
them takes no lock: the training thread looks at the fence several times in each step. Written by `Engine.interrupt` and
`Engine.request_yield` on the control thread, read on the training thread.
"""

from __future__ import annotations

import threading

from shoal_workers.engine.generation_ends import Fenced


class Fence:
    """One worker's fence for all its generations, which count from 0. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fenced_to = -1
        self._yield_to = -1
        self._durable_to = -1

    def raise_to(self, generation: int) -> None:
        """End every generation up to this one."""
        with self._lock:
            self._fenced_to = max(self._fenced_to, generation)

    def request_yield(self, generation: int, *, durable: bool) -> None:
        """Makes every generation up to this one stop at its next step boundary; `durable`: with a checkpoint of it."""
        with self._lock:
            self._yield_to = max(self._yield_to, generation)
            if durable:
                self._durable_to = max(self._durable_to, generation)

    def of(self, generation: int) -> GenerationFence:
        """The fence as one generation sees it."""
        return GenerationFence(self, generation)

    def is_fenced(self, generation: int) -> bool:
        return generation <= self._fenced_to

    def is_yield_requested(self, generation: int) -> bool:
        return generation <= self._yield_to

    def is_durable_requested(self, generation: int) -> bool:
        return generation <= self._durable_to


class GenerationFence:
    """What the control thread has ordered for one generation. Any thread."""

    def __init__(self, fence: Fence, generation: int) -> None:
        self._fence = fence
        self._generation = generation

    @property
    def is_raised(self) -> bool:
        """True if the generation is over."""
        return self._fence.is_fenced(self._generation)

    @property
    def is_yield_requested(self) -> bool:
        return self._fence.is_yield_requested(self._generation)

    @property
    def is_durable_requested(self) -> bool:
        """True if the requested yield needs a durable checkpoint."""
        return self._fence.is_durable_requested(self._generation)

    def check(self) -> None:
        """Raises Fenced if the generation is over."""
        if self.is_raised:
            raise Fenced(f"generation {self._generation} is fenced")
