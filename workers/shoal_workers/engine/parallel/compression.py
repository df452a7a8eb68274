"""The dtypes in which a sharded model computes and its gradients are reduced: FSDP2's mixed-precision policy.

    parameters      fp32, sharded; gathered and used in the compute dtype
    gradients       summed over ranks, and over a rank's micro-batches before that, in the reduction dtype
    optimizer       fp32

A reduction in bf16 or fp16 halves what data-parallel ranks send, as DDP's bf16_compress_hook and fp16_compress_hook do.
In return every addition rounds to 8 or 11 bits, including those of gradient accumulation, because FSDP2 accumulates in
the dtype that it sends. The result then also depends more on the world size than in fp32. Called by `assemble`.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shoal_workers.contract.spec import Precision

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def mixed_precision(compute: Precision, reduction: Precision = Precision.FP32) -> MixedPrecisionPolicy:
    """The policy of every fully_shard of a model. fp32 for both casts nothing."""
    if compute is Precision.FP32 and reduction is Precision.FP32:
        return MixedPrecisionPolicy()
    param_dtype = None if compute is Precision.FP32 else _DTYPES[compute]
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=_DTYPES[reduction])


def compute_dtype(compute: Precision) -> torch.dtype:
    """The dtype of activations."""
    return _DTYPES[compute]
