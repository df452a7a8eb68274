"""Hooks that a model registers on its parameters (`Tensor.register_hook`): moved to what takes a parameter's place.

Sharding replaces every parameter, and autograd differentiates the gathered one, so a hook of the original would never
run. A gradient hook sees the gradient of one micro-batch, as in a loop of plain torch. A hook after accumulation would
see the sum over the micro-batches of one rank, which depends on the world size: it is refused, as is a hook of a
parameter that another axis has split. Called by `assemble`, before and after the data axis is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

Hook = Callable[[Tensor], Tensor | None]
Place = tuple[int, str]
"""Id of a module, and its attribute."""


@dataclass(frozen=True, slots=True)
class HookedParameter:
    """A parameter of the whole model with its hooks."""

    name: str
    parameter: nn.Parameter
    hooks: tuple[Hook, ...]


def hooked_parameters(model: nn.Module) -> list[HookedParameter]:
    """Raises ValueError with the name of a parameter whose hook cannot have a result that is the same at any size."""
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would see the gradients of one "
                "worker's micro-batches only. Use register_hook, which sees that of each micro-batch; or change "
                "gradients in the step() of an optimizer that build_optimizer returns."
            )
        hooks = tuple((parameter._backward_hooks or {}).values())
        if hooks:
            found.append(HookedParameter(name, parameter, hooks))
    return found


def places_of(hooked: Sequence[HookedParameter], part: nn.Module) -> dict[Place, tuple[Hook, ...]]:
    """After all axes but data: where the hooked parameters of a part are.

    Raises ValueError for one that has been split."""
    for one in hooked:
        path, _, attribute = one.name.rpartition(".")
        owner = part
        for step in path.split(".") if path else ():
            owner = getattr(owner, step, owner)
        there = owner._parameters.get(attribute)
        if there is not None and there is not one.parameter:
            raise ValueError(
                f"{one.name} has a gradient hook and is split by the plan, so the hook would see a part of the "
                "gradient. Take the hook away, or leave the module out of plan.tensor and plan.experts."
            )
    hooks = {id(one.parameter): one.hooks for one in hooked}
    return {
        (id(module), name): hooks[id(parameter)]
        for module in part.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in hooks
    }


def move_hooks(places: Mapping[Place, tuple[Hook, ...]], part: nn.Module) -> None:
    """After the data axis has been applied to the part."""
    for module in part.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            records: list[Any] = group.fsdp_params
            for record in records:
                info = record._module_info
                if (hooks := places.get((id(info.module), info.param_name))) is not None:
                    record.init_unsharded_param = _hooking(record, record.init_unsharded_param, hooks)


def _hooking(record: Any, init: Callable[[], None], hooks: tuple[Hook, ...]) -> Callable[[], None]:
    def init_unsharded_param() -> None:
        is_first = not hasattr(record, "_unsharded_param")
        init()
        if is_first:
            for hook in hooks:
                record._unsharded_param.register_hook(hook)

    return init_unsharded_param
