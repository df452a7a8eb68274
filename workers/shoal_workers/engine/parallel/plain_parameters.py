"""What every axis expects of a parameter: a dense block of memory of its own.

    transposed, channels_last, a slice      copied to a contiguous one: the same values, names and shapes
    without elements                        frozen: FSDP2 cannot reduce its gradient, and there is nothing to train
    expanded, sparse, two in one memory     refused by name: they cannot be trained in parts

torch itself refuses a parameter without a dimension. Called by `build_runtime` before any axis is applied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


@torch.no_grad()
def make_plain(model: nn.Module, line: str) -> None:
    """In place. Raises ValueError with the name of a parameter that cannot be trained in parts. `line`: of the task,
    where the model is built."""
    named = list(model.named_parameters())
    for name, parameter in named:
        if (what := _refused(parameter)) is not None:
            raise ValueError(f"{line}: the parameter {name}, {_shown(parameter)}, {what}.")
    for name, other in _overlapping(named):
        raise ValueError(
            f"{line}: the parameters {name} and {other} share memory but are two parameters, so each would be trained "
            "on its own. Assign the same nn.Parameter to both modules if the weights are tied, else clone one of them."
        )
    for _, parameter in named:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if not parameter.numel():
            parameter.requires_grad_(False)


def _refused(parameter: Tensor) -> str | None:
    if parameter.layout is not torch.strided:
        return "is not dense and cannot be sharded; build it with .to_dense()"
    if torch._debug_has_internal_overlap(parameter) == 1:
        return "is expanded: several of its elements are one number in memory; build it with .clone()"
    return None


def _shown(parameter: Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"


def _overlapping(named: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, str]]:
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + _span_bytes(parameter), name, parameter)
        for name, parameter in named
        if parameter.numel() and not parameter.is_meta
    )
    earlier: list[tuple[int, str, nn.Parameter]] = []
    for start, end, name, parameter in spans:
        earlier = [one for one in earlier if one[0] > start]
        for _, other, before in earlier:
            are_blocks = before.is_contiguous() and parameter.is_contiguous()
            if are_blocks or _places(before) & _places(parameter):
                yield other, name
        earlier.append((end, name, parameter))


def _span_bytes(tensor: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _places(tensor: Tensor) -> set[int]:
    """Addresses of the elements. Only for two that lie within each other, of which one is not contiguous."""
    places = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * (stride * tensor.element_size())
    return set(places.reshape(-1).tolist())
