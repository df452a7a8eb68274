"""Registers shared memory with the driver of a GPU, which then copies into it by itself, at the speed of the bus.

Memory that is not registered is filled through a buffer of the driver, page by page, several times as slowly, while
the thread waits. Registration lasts as long as the `Pin`, which must be dropped before the memory is given back. If the
driver refuses (a limit on locked memory), snapshots are as slow as before. Called by the slots.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal_workers.checkpoint.save_plan import local_tensor

_log = logging.getLogger(__name__)


class HostRuntime(Protocol):
    """The two functions of CUDA's runtime; 0 is success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Any: ...  # noqa: N802

    def cudaHostUnregister(self, address: int, /) -> Any: ...  # noqa: N802


class Pin:
    """Registered memory. It keeps the memory mapped until it is unregistered."""

    def __init__(self, memory: Tensor, runtime: HostRuntime) -> None:
        self._memory = memory
        self._runtime = runtime

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter, or the GPU, may be gone
            self._runtime.cudaHostUnregister(self._memory.data_ptr())


def pin(memory: Tensor, runtime: HostRuntime | None) -> Pin | None:
    """None if there is no GPU, or its driver refuses. `memory`: bytes, from the beginning of a page."""
    if runtime is None or not memory.nbytes:
        return None
    status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        _log.warning("snapshot_store.not_pinned", extra={"num_bytes": memory.nbytes, "cuda_error": status})
        _forget_error()
        return None
    return Pin(memory, runtime)


def runtime_of(state: Mapping[str, Tensor]) -> HostRuntime | None:
    """CUDA's, if any tensor is on a GPU."""
    if any(local_tensor(tensor).is_cuda for tensor in state.values()):
        runtime: HostRuntime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return runtime
    return None


def _forget_error() -> None:
    """CUDA reports an error of registration once more at the next launch."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
