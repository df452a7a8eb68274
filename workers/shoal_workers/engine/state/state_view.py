"""The run's tensors by name, made once and kept while they are the same tensors.

Snapshots are taken after every step: naming some hundred tensors and laying the optimizer's shards out as DTensors
takes longer than copying them. Optimizers and modules that replace a tensor instead of writing into it are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal_workers.engine.model.assembly import Assembly
from shoal_workers.engine.state.training_state import tensors_of
from shoal_workers.engine.step.update import Update


@dataclass(frozen=True, slots=True)
class _Known:
    identity: tuple[int, ...]
    held: list[Tensor]
    """What the identity was taken of: an id may come back once its object is gone."""
    tensors: dict[str, Tensor]


class StateView:
    """Of one model and its optimizer, which may live in several places in turn. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        self._assembly = assembly
        self._update = update
        self._place = 0
        self._known: dict[int, _Known] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The same dict as last time, as long as its tensors are the live ones. It shares their memory."""
        live = list(self._live())
        identity = tuple(map(id, live))
        known = self._known.get(self._place)
        if known is None or known.identity != identity:
            known = self._known[self._place] = _Known(identity, live, tensors_of(self._assembly, self._update))
        return known.tensors

    def turn_to(self, place: int) -> None:
        """The tensors are the same objects, but in other memory: that of this number."""
        self._place = place

    def forget(self) -> None:
        """The memory of these numbers is not what it was."""
        self._known.clear()

    def _live(self) -> Iterator[Tensor]:
        yield from self._assembly.live_tensors()
        for state in self._update.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield value
