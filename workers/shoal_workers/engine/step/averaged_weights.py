"""An exponential moving average of the weights (Polyak & Juditsky 1992; `optimizer.ema_decay`), as optimizer state.

    before the first update    average <- weight
    after each update          average <- decay average + (1 - decay) weight
    frozen, never used         no average: such a weight is its own

Since it is one more tensor of an optimizer's state, under the key `weights_ema`, it is sharded, copied, saved and
restored by what does so with moments. A job without it pays nothing. Validation reads the
averages in place of the weights (`averaged_weights`), and so does an export. Buffers are not averaged. Made by
`named_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal_workers.contract.optimizers import EMA
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.added_state import AddedState
from shoal_workers.torch_internals import local_of, set_shard_memory, shard_memory


class Averaging(AddedState):
    """Another optimizer, and an average of what it updates."""

    def __init__(self, inner: Optimizer, *, ema_decay: float) -> None:
        super().__init__(inner)
        self._decay = ema_decay

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        return {EMA: parameter.detach().clone()}

    def follow(self, parameter: Tensor, added: dict[str, Tensor]) -> None:
        added[EMA].lerp_(parameter, 1 - self._decay)


@contextmanager
def averaged_weights(assembly: Assembly, averages: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Makes the model's parameters refer to the averages within the block, on all ranks; without averages does nothing.

    The memory of the weights is not written: it may be a snapshot that others read, and that must stay whole if this
    worker dies here.

    Args:
        averages: parameters of the model, each with the average of this rank's part of it.
    """
    pairs = list(averages)
    if not pairs:
        yield
        return
    assembly.reshard()
    records = assembly.records()
    kept: list[tuple[Tensor, Tensor]] = []
    kept_memory: list[tuple[Any, Tensor]] = []
    try:
        for parameter, average in pairs:
            local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
            record, values = records.get(id(parameter)), average
            if record is not None and (flat := shard_memory(record)).data_ptr() == local.data_ptr():
                padded = _padded(average, flat)
                kept_memory.append((record, flat))
                set_shard_memory(record, padded)
                values = padded[: average.numel()].view(local.shape)
            kept.append((local, local.data))
            local.data = values
        yield
    finally:
        for local, values in kept:
            local.data = values
        for record, flat in kept_memory:
            set_shard_memory(record, flat)


def _padded(average: Tensor, flat: Tensor) -> Tensor:
    """The values as FSDP gathers them: flat, and as long as `flat`. A copy only where it has padding."""
    if average.numel() == flat.numel():
        return average.flatten()
    padded = torch.zeros_like(flat)
    padded[: average.numel()].copy_(average.flatten())
    return padded
