"""Makes DTensor's functional collectives on the CPU use the plain ones, whose waits can be timed and left.

torch's own functional collectives wait in C++ until the operation ends: for a rank that gloo has lost, that is the
timeout. Only all-reduce is used inside a step, by an optimizer of a task's own on DTensors. Called once per worker, by
the engine.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_libraries: list[torch.library.Library] = []
"""Kept, because a library's kernels are removed when it is freed."""


def replace_functional_all_reduce() -> None:
    """Idempotent. The replacement waits itself, so a later `wait_tensor` returns at once."""
    if _libraries:
        return
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_reduce", _all_reduce, "CPU")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _all_reduce(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    reduced = tensor.clone(memory_format=torch.contiguous_format)
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]
    dist.all_reduce(reduced, _OPERATIONS[reduce_op.lower()], group=group)
    return reduced
