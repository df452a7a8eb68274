"""Which dtypes a precision and a reduction stand for."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shoal_workers.contract.spec import Precision
from shoal_workers.engine.parallel.sharding import mixed_precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_fp32_has_no_casts() -> None:
    assert mixed_precision(Precision.FP32) == MixedPrecisionPolicy()


@pytest.mark.parametrize("reduction", list(Precision))
@pytest.mark.parametrize("compute", [Precision.BF16, Precision.FP16])
def test_the_dtypes_of_compute_and_reduction_are_independent(compute: Precision, reduction: Precision) -> None:
    policy = mixed_precision(compute, reduction)
    assert (policy.param_dtype, policy.reduce_dtype) == (DTYPES[compute], DTYPES[reduction])


@pytest.mark.parametrize("reduction", [Precision.BF16, Precision.FP16])
def test_gradients_of_fp32_can_be_reduced_in_a_smaller_dtype(reduction: Precision) -> None:
    policy = mixed_precision(Precision.FP32, reduction)
    assert (policy.param_dtype, policy.reduce_dtype) == (None, DTYPES[reduction])
