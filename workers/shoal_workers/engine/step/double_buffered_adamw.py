"""AdamW that can write its results to other memory than it reads from, so that the state before a step stays complete.

The first operation on each tensor reads the old memory and writes the new; all others stay in the new. A step makes as
many passes over memory as one in place. It has the same operations in the same order as torch.optim.AdamW (foreach, not
capturable, not amsgrad), hence the same bits. A complex number is two real ones, as it is there (`view_as_real`).
Called by `Update`; `DoubleBufferedState` sets the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

_AT_ONCE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ParameterBuffers:
    """Memory for one parameter and its moments, each of the parameter's shape and type, without a gradient history."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def as_real(self) -> ParameterBuffers:
        """Views of the same memory."""
        return ParameterBuffers(_real(self.parameter), _real(self.exp_avg), _real(self.exp_avg_sq))


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
                _update(group, gradients, [float(step) for step in steps], old, new)
            for parameter in group["params"]:
                if parameter.grad is None and parameter in targets:
                    self._copy(parameter, targets[parameter])
                elif parameter.grad is None and parameter in parameter_targets:
                    parameter_targets[parameter].copy_(parameter)

    def _copy(self, parameter: nn.Parameter, target: ParameterBuffers) -> None:
        target.parameter.copy_(parameter)
        target.exp_avg.copy_(self.state[parameter]["exp_avg"])
        target.exp_avg_sq.copy_(self.state[parameter]["exp_avg_sq"])


@torch.no_grad()
def _update(
    group: Mapping[str, Any],
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[ParameterBuffers],
    targets: Sequence[ParameterBuffers],
) -> None:
    """Reads `sources` and writes `targets`, which may be the same.

    `counts`: per parameter, the number of its updates, this one included.
    """
    if any(gradient.is_complex() for gradient in gradients):
        sources, targets = [source.as_real() for source in sources], [target.as_real() for target in targets]
        gradients = [_real(gradient) for gradient in gradients]
    for batch in _batches(gradients):
        _update_together(group, gradients[batch], counts[batch], sources[batch], targets[batch])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _batches(gradients: Sequence[Tensor]) -> Iterator[slice]:
    """Parameters that are updated together: the temporaries of all at once would be as large as the gradients."""
    first = size = 0
    for index, gradient in enumerate(gradients):
        if size and size + gradient.nbytes > _AT_ONCE_BYTES:
            yield slice(first, index)
            first, size = index, 0
        size += gradient.nbytes
    yield slice(first, len(gradients))


def _update_together(
    group: Mapping[str, Any],
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[ParameterBuffers],
    targets: Sequence[ParameterBuffers],
) -> None:
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    # These read the old memory and write the new; everything after them stays in the new.
    for gradient, old, new in zip(gradients, sources, targets, strict=True):
        if weight_decay != 0:
            torch.mul(old.parameter, 1 - lr * weight_decay, out=new.parameter)
        elif new is not old:
            new.parameter.copy_(old.parameter)
        torch.lerp(old.exp_avg, gradient, 1 - beta1, out=new.exp_avg)
        torch.mul(old.exp_avg_sq, beta2, out=new.exp_avg_sq)
    squares = [new.exp_avg_sq for new in targets]
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(
        [new.parameter for new in targets],
        [new.exp_avg for new in targets],
        roots,
        [(lr / (1 - beta1**count)) * -1 for count in counts],
    )
