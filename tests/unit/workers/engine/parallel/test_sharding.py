"""Which dtypes a precision and a reduction stand for, and which dtypes gradients have until they are summed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shoal_workers.contract.spec import Precision
from shoal_workers.engine.parallel.sharding import mixed_precision
from shoal_workers.torch_internals import (
    equalise_gradients,
    forget_gradients,
    fsdp_groups,
    gathered,
    has_gradient,
    keep_gradients_as_computed,
)

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


@pytest.fixture
def sharded() -> Iterator[FSDPModule]:
    """A linear layer that computes in bf16 and sums in fp32, on this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=mixed_precision(Precision.BF16))
    assert isinstance(layer, FSDPModule)
    keep_gradients_as_computed(fsdp_groups(layer)[0])
    yield layer
    dist.destroy_process_group()


def _pass(sharded: FSDPModule, number: int, *, is_last: bool) -> None:
    assert isinstance(sharded, nn.Module)
    sharded.set_requires_gradient_sync(is_last)
    sharded(torch.full((2, 4), 1.0 + number / 7)).square().sum().backward()


def test_a_hook_gets_each_micro_batchs_gradient_in_the_dtype_of_compute(sharded: FSDPModule) -> None:
    """And the sum over micro-batches is that of all these gradients in the dtype of the reduction."""
    [group] = fsdp_groups(sharded)
    _pass(sharded, 0, is_last=False)
    forget_gradients(group.fsdp_params[0])
    seen: list[Tensor] = []
    gathered(group.fsdp_params[0]).register_hook(seen.append)
    for number in range(4):
        _pass(sharded, number, is_last=number == 3)
    assert [one.dtype for one in seen] == [torch.bfloat16] * 4
    weight = group.fsdp_params[0].sharded_param
    assert torch.equal(weight.grad.full_tensor(), torch.stack([one.float() for one in seen]).sum(0))


def test_what_is_not_summed_over_ranks_can_be_seen_made_equal_and_forgotten(sharded: FSDPModule) -> None:
    records = fsdp_groups(sharded)[0].fsdp_params
    _pass(sharded, 0, is_last=False)
    assert all(map(has_gradient, records))
    equalise_gradients(records)
    assert all(map(has_gradient, records))
    for record in records:
        forget_gradients(record)
    assert not any(map(has_gradient, records))
