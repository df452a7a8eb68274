"""AdamW that can write its results to other memory than it reads from, so that the state before a step stays complete.

The operations are in `snapshot_store/log/rules.py`, because the buddy replays them. The first operation on each tensor
reads the old memory and writes the new; all others stay in the new. A step makes as many passes over memory as one in
place. Called by `Update`; `DoubleBufferedState` sets the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shoal_workers.snapshot_store.log.rules import AdamWGroup, ParameterBuffers, update

__all__ = ["DoubleBufferedAdamW", "ParameterBuffers", "settings_of"]


class DoubleBufferedAdamW(AdamW):
    """An AdamW for tensors on a CPU. After each step the caller must make the parameters and the state refer to the
    targets that it set."""

    targets: Mapping[nn.Parameter, ParameterBuffers] | None = None
    """Targets of the next step; a parameter without a target is updated in place."""
    parameter_targets: Mapping[nn.Parameter, Tensor] | None = None
    """Targets of parameters that have no moments yet. If they get some in the step, these are in new memory."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates as torch's AdamW does; a parameter without a gradient is copied to its target unchanged."""
        assert closure is None
        targets, parameter_targets = self.targets or {}, self.parameter_targets or {}
        for group in self.param_groups:
            parameters: list[nn.Parameter] = []
            gradients, averages, squares, steps = [list[Tensor]() for _ in range(4)]
            self._init_group(group, parameters, gradients, averages, squares, [], steps)  # type: ignore[no-untyped-call]
            if parameters:
                old = [ParameterBuffers(*row) for row in zip(parameters, averages, squares, strict=True)]
                new = [
                    replace(buffers, parameter=parameter_targets[parameter])
                    if parameter in parameter_targets
                    else targets.get(parameter, buffers)
                    for parameter, buffers in zip(parameters, old, strict=True)
                ]
                torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
                update(settings_of(group), gradients, [float(step) for step in steps], old, new)
            for parameter in group["params"]:
                if parameter.grad is None and parameter in targets:
                    self._copy(parameter, targets[parameter])
                elif parameter.grad is None and parameter in parameter_targets:
                    parameter_targets[parameter].copy_(parameter)

    def _copy(self, parameter: nn.Parameter, target: ParameterBuffers) -> None:
        target.parameter.copy_(parameter)
        target.exp_avg.copy_(self.state[parameter]["exp_avg"])
        target.exp_avg_sq.copy_(self.state[parameter]["exp_avg_sq"])


def settings_of(group: dict[str, Any]) -> AdamWGroup:
    """The settings of a parameter group as they are now."""
    beta1, beta2 = group["betas"]
    return AdamWGroup(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
