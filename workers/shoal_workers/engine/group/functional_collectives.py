"""Functional collectives of DTensor on the CPU, done by the plain ones, whose waits can be timed and left.

torch's own wait in C++ until the operation ends, which for a rank that gloo has lost is its timeout. The one that is
used inside a step is all-reduce: by the loss on split logits (torch's `loss_parallel`). Called once per process.
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
"""A library's kernels go with it."""


def replace_functional_all_reduce() -> None:
    """Idempotent. Nothing is left to wait for afterwards, so `wait_tensor` returns at once."""
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
