"""An optimizer that adds tensors of its own to the state of another one: averages of weights, the state of an island.

They are optimizer state, so they are sharded, copied, saved and restored by what does so with moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal_workers.contract.optimizers import ADDED_STATE


class AddedState(Optimizer):
    """Another optimizer, and what follows each of its updates. Both have the same groups and the same state."""

    def __init__(self, inner: Optimizer) -> None:
        """`inner`: the other optimizer, which has made no update yet."""
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.state.update(inner.state)
        inner.param_groups, inner.state = self.param_groups, self.state

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return what is added for a parameter before its first update, by the keys of `ADDED_STATE`."""
        raise NotImplementedError

    def follow(self, parameter: Tensor, added: dict[str, Tensor]) -> None:
        """Change what is added, in place, after an update of the parameter. No gradients are recorded."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        updated = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        # Out of the state meanwhile: some optimizers take an empty state for a sign of the first update.
        kept: list[dict[str, Tensor]] = []
        for parameter in updated:
            state = self.state.get(parameter, {})
            added = {key: state.pop(key) for key in ADDED_STATE if key in state}
            kept.append(added or self.begin(parameter))
        self.inner.step()
        for parameter, added in zip(updated, kept, strict=True):
            self.follow(parameter, added)
            self.state[parameter].update(added)
