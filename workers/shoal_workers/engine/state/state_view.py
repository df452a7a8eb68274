"""The run's tensors by name, computed once and reused while they are the same tensors.

Snapshots are taken after every step. Naming some hundred tensors and laying the optimizer's shards out as DTensors
takes longer than copying them. If an optimizer or a module replaces a tensor instead of writing into it, that is
noticed. Called by `DoubleBufferedState`, `Snapshots` and the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.state.training_state import tensors_of
from shoal_workers.engine.step.update import Update


@dataclass(frozen=True, slots=True)
class _Known:
    identity: tuple[int, ...]
    held: list[Tensor]
    """The tensors whose ids are the identity: an id can be reused once its object is gone."""
    tensors: dict[str, Tensor]


class StateView:
    """The tensors of one model and its optimizer; their memory may alternate between buffers. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        self._assembly = assembly
        self._update = update
        self._buffer = 0
        self._known: dict[int, _Known] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The same dict as in the last call if its tensors are still the live ones. It shares their memory."""
        live = list(self._live())
        identity = tuple(map(id, live))
        known = self._known.get(self._buffer)
        if known is None or known.identity != identity:
            known = self._known[self._buffer] = _Known(identity, live, tensors_of(self._assembly, self._update))
        return known.tensors

    def turn_to(self, buffer: int) -> None:
        """The tensors are the same objects, but their memory is now the buffer of this number."""
        self._buffer = buffer

    def forget(self) -> None:
        """The memory behind all buffer numbers has changed."""
        self._known.clear()

    def _live(self) -> Iterator[Tensor]:
        yield from self._assembly.live_tensors()
        for state in self._update.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield value
