"""fp8: the matrix products of the blocks' linear layers in 8 bits, by torchao (`spec.fp8`).

    x, weight, gradient     in bf16 between the products; each is cast to fp8 just before one, with a scale that is
                            computed from it: one for the tensor, or one for each row
    parameters              in fp32 for the optimizer, bf16 when they are gathered. Names, checkpoints and collectives
                            do not change
    not in fp8              embedding, head, attention, experts, routers, adapters; layers with a side that is no
                            multiple of 16, which the matrix units cannot take; layers that compute in another type

Under tp each rank multiplies its own part, so it has a scale of its own: losses differ between layouts by the rounding
of fp8. torchao emulates the products on CPUs, with the same casts and sums in higher precision.

`apply_float8` is one step of `assemble`, after the tensor axis, whose layers call `multiply` as all others do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import Fp8Scales
from shoal_workers.engine.parallel.cutting import local

Product = Callable[[Tensor, Tensor], Tensor]
"""x (..., I), weight (O, I) -> (..., O)."""
_PRODUCT = "_fp8_product"
"""Attribute of a linear layer whose products are in fp8."""
_LEAST_CAPABILITY = (8, 9)
_SIDE = 16
_ADAPTERS = "lora_"


def apply_float8(model: nn.Module, plan: ParallelPlan, scales: Fp8Scales, device_type: str) -> None:
    """Let the linear layers in the model's blocks multiply in fp8. Modules and parameters stay as they are.

    Raises:
        ValueError: the device has no fp8, or torchao is not installed.
    """
    is_emulated = device_type != "cuda"
    if not is_emulated and (reason := why_no_fp8(torch.cuda.get_device_name(), torch.cuda.get_device_capability())):
        raise ValueError(f"fp8 is {scales}, but {reason}")
    product = _product(scales, is_emulated=is_emulated)
    for name, module in model.get_submodule(plan.blocks).named_modules():
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            continue
        is_router = bool(plan.num_experts) and module.out_features == plan.num_experts
        if is_router or _ADAPTERS in name or any(side % _SIDE for side in local(module.weight).shape):
            continue
        setattr(module, _PRODUCT, product)
        if "forward" not in vars(module):  # else the tensor axis has set one, which calls `multiply`
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def why_no_fp8(device: str, capability: tuple[int, int]) -> str:
    """Why a GPU cannot multiply in fp8; "" if it can."""
    if capability >= _LEAST_CAPABILITY:
        return ""
    return (
        f"{device} has compute capability {capability[0]}.{capability[1]}, and fp8 matrix units begin with 8.9 (L40S, "
        "H100 and later). Leave fp8 out, or choose workers with such GPUs."
    )


def multiply(module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer computes with this part of its weight: F.linear, or the product in fp8."""
    product: Product | None = getattr(module, _PRODUCT, None)
    if product is None or x.dtype is not torch.bfloat16:
        return F.linear(x, weight, bias)
    result = product(x, weight)
    return result if bias is None else result + bias


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return multiply(module, x, module.weight, module.bias)


def _product(scales: Fp8Scales, *, is_emulated: bool) -> Product:
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise ValueError(
            f"fp8 is {scales}, and torchao cannot be imported ({error}). Install it on every node: pip install "
            "'shoal[fp8]'."
        ) from None
    config = replace(Float8LinearConfig.from_recipe_name(str(scales)), emulate=is_emulated, pad_inner_dim=True)
    with torch.device("meta"):
        layer = Float8Linear(_SIDE, _SIDE, bias=False, config=config)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), layer.linear_mm_config, config)
        return result

    return product
