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
        self.fenced_to = -1
        self.yield_to = -1
        self.durable_to = -1
        """The newest generation that is over, shall yield, and shall yield with a checkpoint."""

    def raise_to(self, generation: int) -> None:
        """End every generation up to this one."""
        with self._lock:
            self.fenced_to = max(self.fenced_to, generation)

    def request_yield(self, generation: int, *, durable: bool) -> None:
        """Make every generation up to this one stop at its next step boundary; `durable`: with a checkpoint of it."""
        with self._lock:
            self.yield_to = max(self.yield_to, generation)
            if durable:
                self.durable_to = max(self.durable_to, generation)

    def of(self, generation: int) -> GenerationFence:
        """The fence as one generation sees it."""
        return GenerationFence(self, generation)


class GenerationFence:
    """What the control thread has ordered for one generation. Any thread."""

    def __init__(self, fence: Fence, generation: int) -> None:
        self._fence = fence
        self._generation = generation

    @property
    def is_raised(self) -> bool:
        """True if the generation is over."""
        return self._generation <= self._fence.fenced_to

    @property
    def is_yield_requested(self) -> bool:
        return self._generation <= self._fence.yield_to

    @property
    def is_durable_requested(self) -> bool:
        """True if the requested yield needs a durable checkpoint."""
        return self._generation <= self._fence.durable_to

    def check(self) -> None:
        """Raises Fenced if the generation is over."""
        if self.is_raised:
            raise Fenced(f"generation {self._generation} is fenced")
