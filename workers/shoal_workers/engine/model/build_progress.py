"""Progress of a long build: the parameters that the task's code has created so far. Called by `build_runtime`.

A build of many billions of parameters takes minutes. torch calls a hook for each parameter that a module registers, so
its progress is known without the help of the task. Where each parameter is written at once, the memory that is left is
compared with the next one, so that a model that cannot be built ends in words, not in a kill. Training thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_LOOK_BYTES = 64 << 20
"""Created between two looks at the memory that is left."""
_MARGIN_BYTES = 128 << 20
_MIB = 1 << 20


class ModelTooLarge(Exception):
    """The whole model does not fit into the memory that is left for this worker."""


@contextmanager
def refused_if_too_large(available: Callable[[], int]) -> Iterator[None]:
    """Around code that writes all parameters of a model. `available`: bytes that this process may still take.

    Workers of one node build at the same time, and each sees what the others have written. Raises ModelTooLarge."""
    created = since = 0

    def look(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal created, since
        size = parameter.nbytes if parameter is not None and parameter.layout is torch.strided else 0
        since += size
        if since >= _LOOK_BYTES:
            since = 0
            left = available()
            if size + _MARGIN_BYTES > left:
                raise ModelTooLarge(
                    f"the whole model does not fit into this worker's memory: after {created / _MIB:,.0f} MiB of "
                    f"parameters, {name} of {type(module).__name__} takes {size / _MIB:,.0f} MiB and "
                    f"{_MARGIN_BYTES / _MIB:,.0f} MiB are kept free, but {left / _MIB:,.0f} MiB are left. Every worker "
                    "builds the whole model before it keeps its part. Set deferred_init = True in the task "
                    "(docs/tasks.md), or run fewer workers on a node."
                )
        created += size

    handle = register_module_parameter_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def noted(note: Callable[[str], None], *, every_s: float = 0.5) -> Iterator[None]:
    """Within it, `note` gets the number of parameters that were created, at most once in `every_s` seconds."""
    created, noted_mono = 0, time.monotonic()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal created, noted_mono
        created += parameter.numel() if parameter is not None else 0
        if time.monotonic() - noted_mono >= every_s:
            noted_mono = time.monotonic()
            note(f"building the model: {created:,} parameters so far")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
