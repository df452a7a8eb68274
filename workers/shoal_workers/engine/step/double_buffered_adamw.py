"""AdamW that can write its results to other memory than it reads from, so that the state before a step stays complete.

The same operations in the same order as torch.optim.AdamW (foreach, not capturable, not amsgrad), hence the same bits.
The first operation on each tensor reads the old memory and writes the new; all others stay in the new. A step makes as
many passes over memory as one in place. Called by `Update`; `DoubleBufferedState` sets the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW


@dataclass(frozen=True, slots=True)
class ParameterBuffers:
    """Memory for one parameter and its moments, each of the parameter's shape and type, without a gradient history."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class DoubleBufferedAdamW(AdamW):
    """On CPU. After each step the caller must make the parameters and the state refer to the targets that it set."""

    targets: Mapping[nn.Parameter, ParameterBuffers] | None = None
    """Targets of the next step; a parameter without a target is updated in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """As torch's; a parameter without a gradient is copied to its target unchanged."""
        assert closure is None
        targets = self.targets or {}
        for group in self.param_groups:
            parameters: list[nn.Parameter] = []
            gradients, averages, squares, steps = [list[Tensor]() for _ in range(4)]
            self._init_group(group, parameters, gradients, averages, squares, [], steps)  # type: ignore[no-untyped-call]
            if parameters:
                old = [ParameterBuffers(*row) for row in zip(parameters, averages, squares, strict=True)]
                new = [targets.get(parameter, buffers) for parameter, buffers in zip(parameters, old, strict=True)]
                _update(group, gradients, steps, old, new)
            for parameter in group["params"]:
                if parameter.grad is None and parameter in targets:
                    self._copy(parameter, targets[parameter])

    def _copy(self, parameter: nn.Parameter, target: ParameterBuffers) -> None:
        target.parameter.copy_(parameter)
        target.exp_avg.copy_(self.state[parameter]["exp_avg"])
        target.exp_avg_sq.copy_(self.state[parameter]["exp_avg_sq"])


def _update(
    group: dict[str, Any],
    gradients: list[Tensor],
    steps: list[Tensor],
    sources: list[ParameterBuffers],
    targets: list[ParameterBuffers],
) -> None:
    (beta1, beta2), lr = group["betas"], group["lr"]
    torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
    for gradient, old, new in zip(gradients, sources, targets, strict=True):
        if group["weight_decay"] != 0:
            torch.mul(old.parameter, 1 - lr * group["weight_decay"], out=new.parameter)
        elif new is not old:
            new.parameter.copy_(old.parameter)
        torch.lerp(old.exp_avg, gradient, 1 - beta1, out=new.exp_avg)
        torch.mul(old.exp_avg_sq, beta2, out=new.exp_avg_sq)
    squares = [new.exp_avg_sq for new in targets]
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    counts = [float(step) for step in steps]
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(
        [new.parameter for new in targets],
        [new.exp_avg for new in targets],
        roots,
        [(lr / (1 - beta1**count)) * -1 for count in counts],
    )
