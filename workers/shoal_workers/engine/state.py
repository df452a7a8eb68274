"""The state of a run as flat names and tensors, which is what a checkpoint holds.

    model.<parameter or buffer>           DTensor or Tensor
    optim.<parameter>.<key>               DTensor or Tensor, for example optim.blocks.0.wq.weight.exp_avg
    extra                                 small JSON: step, seed, and the plain values that the optimizer keeps

Names are the modules' own, so any world size can read what any other wrote. Nothing of it depends on a rank. Learning
rate and randomness are pure functions of step and seed, therefore the step is all that there is to keep of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_NOT_KEPT = ("params", "lr", "initial_lr")
_PLAIN = (bool, int, float, str, type(None))


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of the run, by name; they alias the live ones. Tied weights appear once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"the model's state {name!r} is {type(value).__name__}; only tensors can be checkpointed.")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[f"model.{name}"] = value.detach()
    for name, key, value in _optimizer_entries(model, optimizer):
        if isinstance(value, Tensor):
            tensors[f"optim.{name}.{key}"] = value.detach()
    return tensors


def extra_of(model: nn.Module, optimizer: Optimizer, *, step: int, seed: int) -> dict[str, Any]:
    """What is not a tensor, ready for JSON."""
    values = {
        f"{name}.{key}": value
        for name, key, value in _optimizer_entries(model, optimizer)
        if not isinstance(value, Tensor)
    }
    for key, value in values.items():
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"optimizer state {key!r} is {type(value).__name__}; only tensors and plain values are kept."
            )
    groups = [
        {key: value for key, value in group.items() if key not in _NOT_KEPT and isinstance(value, _PLAIN)}
        for group in optimizer.param_groups
    ]
    return {"step": step, "seed": seed, "optimizer_values": values, "param_groups": groups}


def apply_extra(extra: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> int:
    """Put the plain values back after the tensors have been read; returns the step."""
    values = extra.get("optimizer_values", {})
    names = _parameter_names(model)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                state[key] = values.get(f"{names[id(parameter)]}.{key}", value)
    for group, saved in zip(optimizer.param_groups, extra.get("param_groups", ()), strict=False):
        group.update(saved)
    return int(extra["step"])


def _optimizer_entries(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, str, Any]]:
    names = _parameter_names(model)
    return [
        (names[id(parameter)], key, value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if id(parameter) in names
    ]


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}
