"""AdamW that can write its results to other memory than it reads from, so that the state before a step stays complete.

The first operation on each tensor reads the old memory and writes the new; all others stay in the new. A step makes as
many passes over memory as one in place. It has the same operations in the same order as torch.optim.AdamW (foreach, not
capturable, not amsgrad), hence the same bits. A complex number is two real ones, as it is there (`view_as_real`).
Called by `Update`; `DoubleBufferedState` sets the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

_AT_ONCE_BYTES = 32 << 20


Tensors = tuple[Tensor, ...]
"""A parameter, the average of its gradients, and that of their squares."""


class DoubleBufferedAdamW(AdamW):
    """An AdamW for tensors on a CPU. After each step the caller must make the parameters and the state refer to the
    targets that it set."""

    targets: Mapping[Tensor, Tensor] = MappingProxyType({})
    """Memory for what the next step, and no other one, makes of parameters and moments, by what they are in now; of the
    same shape and type, without a gradient history. A tensor without a target is updated in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates as torch's AdamW does; a parameter without a gradient is copied to its target unchanged."""
        assert closure is None
        targets, self.targets = self.targets, {}
        for group in self.param_groups:
            parameters: list[nn.Parameter] = []
            gradients, averages, squares, steps = [list[Tensor]() for _ in range(4)]
            self._init_group(group, parameters, gradients, averages, squares, [], steps)  # type: ignore[no-untyped-call]
            if parameters:
                old: list[Tensors] = list(zip(parameters, averages, squares, strict=True))
                new = [tuple(targets.get(tensor, tensor) for tensor in tensors) for tensors in old]
                torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
                _update(group, gradients, [float(step) for step in steps], old, new)
            for parameter in group["params"]:
                tensors = (parameter, *self.state.get(parameter, {}).values()) if parameter.grad is None else ()
                for tensor in tensors:
                    if tensor in targets:
                        targets[tensor].copy_(tensor)


@torch.no_grad()
def _update(
    group: Mapping[str, Any],
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[Tensors],
    targets: Sequence[Tensors],
) -> None:
    """Reads `sources` and writes `targets`, which may be the same.

    `counts`: per parameter, the number of its updates, this one included.
    """
    if any(gradient.is_complex() for gradient in gradients):
        sources, targets = ([tuple(map(_real, tensors)) for tensors in rows] for rows in (sources, targets))
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
    sources: Sequence[Tensors],
    targets: Sequence[Tensors],
) -> None:
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    # These read the old memory and write the new; everything after them stays in the new.
    parameters, averages, squares = (list(column) for column in zip(*targets, strict=True))
    for index, (parameter, average, square) in enumerate(sources):
        if weight_decay != 0:
            torch.mul(parameter, 1 - lr * weight_decay, out=parameters[index])
        elif parameters[index] is not parameter:
            parameters[index].copy_(parameter)
        torch.lerp(average, gradients[index], 1 - beta1, out=averages[index])
        torch.mul(square, beta2, out=squares[index])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(
        parameters,
        averages,
        roots,
        [(lr / (1 - beta1**count)) * -1 for count in counts],
    )
