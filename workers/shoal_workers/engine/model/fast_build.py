"""Builds a model without drawing its initial weights, for a generation whose restore overwrites all of them.

Drawing 10 M normal numbers takes 90 ms; leaving the memory untouched takes 1 ms. A dispatch mode skips the random fills
of parameters. It also gives every large empty tensor a mapping of its own: the whole model is built only to be split,
and if it took the memory that the worker keeps (warm_memory.py), its parts would go to pages that were never touched.
Other random values of the task's code (a random mask, a buffer that no checkpoint holds) would then come from another
position of the random stream, so a model that draws any is built again in full. Called by `build_runtime` and
`warm_up`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_LARGE_BYTES = 64 << 10
_FILLS = frozenset({"aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_", "aten::bernoulli_"})


class _SkipInit(TorchDispatchMode):
    """Records whether random values were drawn for anything but a parameter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew_elsewhere = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.name in _FILLS and isinstance(args[0], nn.Parameter):
                return args[0]
            self.drew_elsewhere = True
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _is_large(args[0], **kwargs):
            return _separate_mapping(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        return func(*args, **kwargs)


def _is_large(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> bool:
    """An ordinary tensor on the CPU, of several pages."""
    is_plain = layout in (None, torch.strided) and memory_format in (None, torch.contiguous_format)
    dtype = dtype or torch.get_default_dtype()
    return is_plain and str(device or "cpu") == "cpu" and prod(size) * dtype.itemsize >= _LARGE_BYTES


def _separate_mapping(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written. The memory returns to the kernel with the tensor."""
    memory = mmap.mmap(-1, prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def build_for_restore(build: Callable[[], nn.Module]) -> nn.Module:
    """`build()`, which must seed the random generators. Parameters hold arbitrary values, everything else is as usual.

    The model does not use the pages that the worker keeps: those are for the parts that are split off and written.
    """
    with _SkipInit() as mode:
        model = build()
    return build() if mode.drew_elsewhere else model
