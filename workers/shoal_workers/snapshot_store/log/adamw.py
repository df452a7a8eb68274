"""The operations of one AdamW update. The training step and the replay on the buddy both call this function.

The same operations in the same order as torch.optim.AdamW (foreach, not capturable, not amsgrad), hence the same bits.
A complex number is two real ones, as it is there (`view_as_real`). Every operation works element by element, so the
bits depend neither on the memory that is read or written nor on the process. They may depend on the instruction set and
on the number of threads: `records.LogHead` has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """The settings of one parameter group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@torch.no_grad()
def update(
    group: AdamWGroup,
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[ParameterBuffers],
    targets: Sequence[ParameterBuffers],
) -> None:
    """Reads `sources` and writes `targets`, which may be the same.

    `counts`: per parameter, the number of its updates, this one included.
    """
    if any(gradient.is_complex() for gradient in gradients):
        sources, targets = [one.as_real() for one in sources], [one.as_real() for one in targets]
        gradients = [_real(gradient) for gradient in gradients]
    for batch in _batches(gradients):
        _update(group, gradients[batch], counts[batch], sources[batch], targets[batch])


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


def _update(
    group: AdamWGroup,
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[ParameterBuffers],
    targets: Sequence[ParameterBuffers],
) -> None:
    for gradient, old, new in zip(gradients, sources, targets, strict=True):
        if group.weight_decay != 0:
            torch.mul(old.parameter, 1 - group.lr * group.weight_decay, out=new.parameter)
        elif new is not old:
            new.parameter.copy_(old.parameter)
        torch.lerp(old.exp_avg, gradient, 1 - group.beta1, out=new.exp_avg)
        torch.mul(old.exp_avg_sq, group.beta2, out=new.exp_avg_sq)
    squares = [new.exp_avg_sq for new in targets]
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - group.beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - group.beta2**count) ** 0.5 for count in counts])
    torch._foreach_add_(roots, group.eps)
    torch._foreach_addcdiv_(
        [new.parameter for new in targets],
        [new.exp_avg for new in targets],
        roots,
        [(group.lr / (1 - group.beta1**count)) * -1 for count in counts],
    )
