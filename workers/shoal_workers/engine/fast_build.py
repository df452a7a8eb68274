"""Builds a model without drawing its initial weights, where every one of them is about to be overwritten by a restore.

Drawing 10 M normal numbers takes 90 ms; leaving the memory untouched takes 1 ms. A dispatch mode swallows the random
fills of parameters. Whatever else the task's code draws (a random mask, a buffer that no checkpoint holds) would then
come out of another place of the random stream, so a model that does so is built again in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS = frozenset({"aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_", "aten::bernoulli_"})


class _SkipInit(TorchDispatchMode):
    """Remembers whether anything random went elsewhere than into a parameter."""

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
        return func(*args, **(kwargs or {}))


def build_for_restore(build: Callable[[], nn.Module]) -> nn.Module:
    """`build()`, whose parameters hold anything; buffers and everything else are as `build()` makes them."""
    with _SkipInit() as mode:
        model = build()
    return build() if mode.drew_elsewhere else model
