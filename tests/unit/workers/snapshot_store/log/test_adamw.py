"""The update that training and replay share has the bits of torch.optim.AdamW, for parameters of any dtype."""

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from shoal_workers.snapshot_store.log.rules import AdamWGroup, ParameterBuffers, update

GROUP = AdamWGroup(lr=0.05, beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def _drawn(dtype: torch.dtype, seed: int) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn((7, 3), dtype=wide, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("is_double_buffered", [True, False])
def test_mixed_dtypes_are_updated_as_torch_updates_them(is_double_buffered: bool) -> None:
    own = [_drawn(dtype, seed) for seed, dtype in enumerate(DTYPES)]
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in own]
    optimizer = AdamW(parameters, lr=GROUP.lr, betas=(GROUP.beta1, GROUP.beta2), eps=GROUP.eps, weight_decay=0.1)
    now = [ParameterBuffers(tensor, torch.zeros_like(tensor), torch.zeros_like(tensor)) for tensor in own]
    other = [ParameterBuffers(*(torch.full_like(tensor, 9) for _ in range(3))) for tensor in own]
    for step in range(1, 5):
        gradients = [_drawn(tensor.dtype, 100 * step + index) for index, tensor in enumerate(own)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        targets = other if is_double_buffered else now
        update(GROUP, gradients, [float(step)] * len(own), now, targets)
        now, other = targets, now
        for parameter, buffers in zip(parameters, now, strict=True):
            state = optimizer.state[parameter]
            assert torch.equal(parameter.detach(), buffers.parameter), (step, parameter.dtype)
            assert torch.equal(state["exp_avg"], buffers.exp_avg)
            assert torch.equal(state["exp_avg_sq"], buffers.exp_avg_sq)
