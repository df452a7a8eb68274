"""AdamW whose results may go to other memory than its operands are in, so that the state before a step stays whole.

The same operations in the same order as torch.optim.AdamW (foreach, not capturable, not amsgrad), hence the same bits;
the first of each tensor's operations reads the old memory and writes the new, all others stay in the new. It
takes no more passes over memory than a step in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW


@dataclass(frozen=True, slots=True)
class Place:
    """Where the results of a step go, for one parameter; of its shape and type, without a gradient history."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class DoubleBufferedAdamW(AdamW):
    """On CPU. Whoever sets `places` makes the parameters and the state refer to them after each step."""

    places: Mapping[nn.Parameter, Place] | None = None
    """Of the next step; a parameter that is not in it is updated in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """As torch's; a parameter without a gradient is carried over as it is."""
        assert closure is None
        places = self.places or {}
        for group in self.param_groups:
            parameters: list[nn.Parameter] = []
            gradients, averages, squares, steps = [list[Tensor]() for _ in range(4)]
            self._init_group(group, parameters, gradients, averages, squares, [], steps)  # type: ignore[no-untyped-call]
            if parameters:
                here = [Place(*row) for row in zip(parameters, averages, squares, strict=True)]
                there = [places.get(parameter, place) for parameter, place in zip(parameters, here, strict=True)]
                _update(group, gradients, steps, here, there)
            for parameter in group["params"]:
                if parameter.grad is None and parameter in places:
                    self._carry_over(parameter, places[parameter])

    def _carry_over(self, parameter: nn.Parameter, place: Place) -> None:
        place.parameter.copy_(parameter)
        place.exp_avg.copy_(self.state[parameter]["exp_avg"])
        place.exp_avg_sq.copy_(self.state[parameter]["exp_avg_sq"])


def _update(
    group: dict[str, Any], gradients: list[Tensor], steps: list[Tensor], here: list[Place], there: list[Place]
) -> None:
    (beta1, beta2), lr = group["betas"], group["lr"]
    torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
    for gradient, old, new in zip(gradients, here, there, strict=True):
        if group["weight_decay"] != 0:
            torch.mul(old.parameter, 1 - lr * group["weight_decay"], out=new.parameter)
        elif new is not old:
            new.parameter.copy_(old.parameter)
        torch.lerp(old.exp_avg, gradient, 1 - beta1, out=new.exp_avg)
        torch.mul(old.exp_avg_sq, beta2, out=new.exp_avg_sq)
    squares = [new.exp_avg_sq for new in there]
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    counts = [float(step) for step in steps]
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(
        [new.parameter for new in there],
        [new.exp_avg for new in there],
        roots,
        [(lr / (1 - beta1**count)) * -1 for count in counts],
    )
