"""Progress of a long build: the parameters that the task's code has created so far. Called by `build_runtime`.

A build of many billions of parameters takes minutes. torch calls a hook for each parameter that a module registers, so
its progress is known without the help of the task. Training thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


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
