"""Optimizers that torch does not have, or does not have for sharded parameters.

    Lion            elementwise: runs on local shards
    Adafactor       torch's own update of whole tensors
    MuonAndAdamW    torch's Muon of whole matrices, and torch's AdamW of the local shards of all other parameters

The last two update whole tensors: each rank gathers one parameter at a time, with its gradient, calls torch's function,
and keeps its own part of the result. So the values are those of one process, whatever the layout. The state that has
the shape of its parameter is sharded as that is; the rest (the factors of Adafactor) is small, and equal on all ranks.
Snapshots of them are copies. Made by `named_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Adafactor as TorchAdafactor
from torch.optim import AdamW, Muon, Optimizer

from shoal_workers.engine.parallel.cutting import local, shard_like


class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): steps along the sign of an average of gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas) or len(betas) != 2:
            raise ValueError(f"betas {list(betas)} must be two numbers from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                average = state["exp_avg"]
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - first).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - second)


class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern 2018) with the settings and values of `torch.optim.Adafactor`, also for DTensors."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **settings: Any) -> None:
        defaults = TorchAdafactor([nn.Parameter(torch.zeros(1))], lr=lr, **settings).defaults
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step_whole(TorchAdafactor, parameter, self.state[parameter], _settings(group))


class MuonAndAdamW(Optimizer):
    """Muon (Jordan et al. 2024) of the groups with `is_muon`, AdamW of all others.

    The rate of a matrix is adjusted so that its update is as large as one of AdamW (Liu et al. 2025), unless
    `adjust_lr_fn` says otherwise: both parts have one rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        adjust_lr_fn: str = "match_rms_adamw",
        **muon: Any,
    ) -> None:
        settings = Muon([nn.Parameter(torch.zeros(1, 1))], lr=lr, adjust_lr_fn=adjust_lr_fn, **muon).defaults
        self._muon = {key: settings[key] for key in settings.keys() - {"lr", "weight_decay"}}
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": settings["weight_decay"], "is_muon": False}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            settings = _settings(group)
            is_muon, betas, eps = (settings.pop(key) for key in ("is_muon", "betas", "eps"))
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            if is_muon:
                for parameter in with_gradient:
                    _step_whole(Muon, parameter, self.state[parameter], settings | self._muon)
            elif with_gradient:
                states = [self.state[parameter] for parameter in with_gradient]
                _step_local(AdamW, with_gradient, states, settings | {"betas": betas, "eps": eps})


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}


def _step_whole(
    kind: Callable[..., Optimizer], parameter: nn.Parameter, state: dict[str, Any], settings: Mapping[str, Any]
) -> None:
    """Collective over the parameter's mesh."""
    assert parameter.grad is not None
    whole = nn.Parameter(_whole(parameter).detach().clone())
    whole.grad = _whole(parameter.grad)
    optimizer = kind([whole], **settings)
    if state:
        optimizer.state[whole] = {key: _whole(value) for key, value in state.items()}
    optimizer.step()
    local(parameter).copy_(_own_part(whole.detach(), parameter))
    for key, value in optimizer.state[whole].items():
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape != ():
            part = _own_part(value, parameter)
            if key in state:
                local(state[key]).copy_(part)
            else:
                state[key] = shard_like(parameter, part.clone())
        elif key in state and isinstance(value, Tensor):
            state[key].copy_(value)
        else:
            state[key] = value


def _step_local(
    kind: Callable[..., Optimizer],
    parameters: list[nn.Parameter],
    states: list[dict[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    local_parameters = [nn.Parameter(local(parameter).detach()) for parameter in parameters]
    for parameter, part in zip(parameters, local_parameters, strict=True):
        assert parameter.grad is not None
        part.grad = local(parameter.grad)
    optimizer = kind(local_parameters, **settings)
    for part, state in zip(local_parameters, states, strict=True):
        if state:
            optimizer.state[part] = {key: local(value) for key, value in state.items()}
    optimizer.step()
    for parameter, part, state in zip(parameters, local_parameters, states, strict=True):
        for key, value in optimizer.state[part].items():
            if key not in state:
                is_sharded = isinstance(parameter, DTensor) and value.ndim and value.shape == part.shape
                state[key] = shard_like(cast(DTensor, parameter), value) if is_sharded else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _own_part(whole: Tensor, owner: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has."""
    if not isinstance(owner, DTensor):
        return whole
    everywhere = DTensor.from_local(whole, owner.device_mesh, [Replicate()] * owner.device_mesh.ndim, run_check=False)
    return local(everywhere.redistribute(placements=owner.placements))
