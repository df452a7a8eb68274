"""The run's tensors by name, made once and kept while they are the same tensors.

Snapshots are taken after every step: naming some hundred tensors and laying the optimizer's shards out as DTensors
takes longer than copying them. Optimizers and modules that replace a tensor instead of writing into it are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shoal_workers.engine.assembly import Assembly
from shoal_workers.engine.state import tensors_of
from shoal_workers.engine.update import Update


class StateView:
    """Of one model and its optimizer. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        self._assembly = assembly
        self._update = update
        self._identity: tuple[int, ...] = ()
        self._held: list[Tensor] = []
        """What the identity was taken of: an id may come back once its object is gone."""
        self._tensors: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The same dict as last time, as long as its tensors are the live ones. It shares their memory."""
        live = list(self._live())
        identity = tuple(map(id, live))
        if identity != self._identity:
            self._identity, self._held = identity, live
            self._tensors = tensors_of(self._assembly, self._update)
        return self._tensors

    def forget(self) -> None:
        """The tensors are the same, but have moved to other memory."""
        self._identity = ()

    def _live(self) -> Iterator[Tensor]:
        yield from self._assembly.live_tensors()
        for state in self._update.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield value
