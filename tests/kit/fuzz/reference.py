"""What is right: a plain loop in one process, with torch alone, as docs/tasks.md describes a step.

buffers         each micro-batch begins with those of the step; the step ends with them plus the mean of what the
                micro-batches changed (integers: the sum). Those of BatchNorm and InstanceNorm, on which outputs of
                training do not depend, go from one micro-batch to the next
how far rounding reaches    the same loop in float64, and twice with gradients that differ in their last bits

Runs in a process of its own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kit.fuzz.draw import SEED, STEPS, Description
from kit.fuzz.task import Drawn
from shoal_workers.contract.batch_partition import randomness_seed, sample_at, sample_positions

_VALIDATION = 0x56414C49
_NOISE = 3e-7
_NOISE_OF_MUON = 2e-3
"""It orthogonalises in bf16, and gives directions that hardly any gradient has the same length as the others."""
_SEQUENTIAL = nn.modules.batchnorm._NormBase


@dataclass(frozen=True)
class Seen:
    """What one run to its end has shown. Steps count from 1."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    validation: float = math.nan
    tensors: dict[str, Any] = field(default_factory=dict)
    """Parameters and persistent buffers after the last step, as arrays, by name."""
    steps: dict[str, float] = field(default_factory=dict)
    """The relative distance of neighbouring numbers, of those in half precision."""


@dataclass(frozen=True)
class Reference:
    """`error`: the plain loop itself cannot train the task; the rest is empty then."""

    seen: Seen
    others: tuple[Seen, ...] = ()
    """Runs that differ from it by rounding only."""
    error: str = ""


def reference(description: dict[str, Any]) -> Reference:
    torch.set_num_threads(1)
    drawn = Description.from_json(description)
    try:
        seen = _train(drawn)
    except Exception as error:
        return Reference(Seen(), error=f"{type(error).__name__}: {error}")
    others = [_train(drawn, noise=number) for number in (1, 2)]
    if all(piece.kind != "lazy" for piece in drawn.pieces):  # drawn in the first pass, and so in float64
        try:
            others.append(_train(drawn, widen=True))
        except Exception:  # some modules have one dtype
            pass
    return Reference(seen, tuple(others))


def _train(drawn: Description, *, noise: int = 0, widen: bool = False) -> Seen:
    task = Drawn(model=drawn.to_json(), data={}, seed=SEED)
    collate = torch.utils.data.default_collate
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    model: nn.Module = task.build_model()
    if widen:
        model._apply(lambda t: t.double() if t.dtype is torch.float32 else t)

    def cast(batch: Any) -> Any:
        if isinstance(batch, dict):
            return batch
        return [t.double() if widen and t.dtype is torch.float32 else t for t in batch]

    optimizer = _optimizer(task, model, drawn)
    peaks = [group["lr"] for group in optimizer.param_groups]
    data, held_out = task.build_dataset("train"), task.build_dataset("validation")
    micro, count = drawn.micro_size, drawn.num_micro_batches
    noises = torch.Generator().manual_seed(noise)
    losses, norms, metrics = {}, {}, {}
    for step in range(STEPS):
        model.zero_grad()  # not the optimizer's, which may lack some
        buffers, total, metric = StepBuffers(model), 0.0, 0.0
        for index in range(count):
            _seed(randomness_seed(SEED, step, index))
            positions = sample_positions(step, index, global_size=micro * count, micro_size=micro)
            batch = collate([data[sample_at(p, num_samples=len(data), seed=SEED)] for p in positions])
            buffers.begin()
            loss, value = _split(task.loss(model, cast(batch)))
            (loss / count).backward()
            buffers.end(1 / count)
            total, metric = total + loss.item() / count, metric + value / count
        buffers.apply()
        _add_noise(model, noise, noises, _NOISE_OF_MUON if drawn.optim.kind == "muon" else _NOISE)
        norms[step + 1] = _clip(model, drawn.clip_norm)
        losses[step + 1], metrics[step + 1] = total, metric
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * _factor(drawn, step)
        _seed(randomness_seed(SEED, step, count))
        optimizer.step()
    model.eval()
    sums = 0.0
    with torch.no_grad():
        for first in range(0, len(held_out), micro):
            samples = range(first, min(first + micro, len(held_out)))
            _seed(randomness_seed(SEED ^ _VALIDATION, 0, first))
            loss, _ = _split(task.loss(model, cast(collate([held_out[i] for i in samples]))))
            sums += loss.item() * len(samples)
    return Seen(losses, norms, metrics, sums / len(held_out), tensors_of(model), _steps_of(model))


class StepBuffers:
    """The rule of the module docstring, for one step."""

    def __init__(self, model: nn.Module) -> None:
        sequential = {id(owner) for owner in model.modules() if isinstance(owner, _SEQUENTIAL)}
        self._places = list(
            {
                id(value): (owner, name)
                for owner in model.modules()
                if id(owner) not in sequential
                for name, value in owner.named_buffers(recurse=False)
            }.values()
        )
        self._before = [getattr(owner, name).clone() for owner, name in self._places]
        self._change = [torch.zeros_like(value) for value in self._before]

    def begin(self) -> None:
        for (owner, name), value in zip(self._places, self._before, strict=True):
            getattr(owner, name).data.copy_(value)

    def end(self, weight: float) -> None:
        for index, ((owner, name), value) in enumerate(zip(self._places, self._before, strict=True)):
            change = getattr(owner, name).detach() - value
            self._change[index] += change * weight if value.dtype.is_floating_point else change

    def apply(self) -> None:
        for (owner, name), value, change in zip(self._places, self._before, self._change, strict=True):
            getattr(owner, name).data.copy_(value + change)


def tensors_of(model: nn.Module) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    kept = model.state_dict()
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    return {name: array(value) for name, value in {**parameters, **buffers}.items()}


def _steps_of(model: nn.Module) -> dict[str, float]:
    half = (torch.bfloat16, torch.float16)
    return {name: torch.finfo(one.dtype).eps for name, one in model.named_parameters() if one.dtype in half}


def array(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy().copy()
    return tensor.double().numpy().copy()


def _optimizer(task: Any, model: nn.Module, drawn: Description) -> torch.optim.Optimizer:
    if task.build_optimizer is not None:
        optimizer: torch.optim.Optimizer = task.build_optimizer(model, {"lr": drawn.lr})
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=drawn.lr, betas=(0.9, 0.95), eps=1e-3)


def _factor(drawn: Description, step: int) -> float:
    if step < drawn.warmup_steps:
        return (step + 1) / drawn.warmup_steps
    done = (step + 1 - drawn.warmup_steps) / (STEPS - drawn.warmup_steps)
    match drawn.schedule:
        case "linear":
            return 0.1 + 0.9 * (1 - done)
        case "cosine":
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
    return 1.0


def _split(returned: Any) -> tuple[Tensor, float]:
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    return loss, float(metrics.get("accuracy", 0.0))


@torch.no_grad()
def _clip(model: nn.Module, limit: float | None) -> float:
    """As torch.nn.utils.clip_grad_norm_, which knows no sparse gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norm = math.sqrt(sum(float(value.abs().double().square().sum()) for value in values))
    for gradient in gradients:
        if limit is not None:
            gradient.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


@torch.no_grad()
def _add_noise(model: nn.Module, number: int, generator: torch.Generator, level: float) -> None:
    """As large as rounding may be. 0: none."""
    for parameter in model.parameters():
        if number and parameter.grad is not None and parameter.grad.numel() and not parameter.grad.is_sparse:
            noise = torch.randn(parameter.grad.shape, generator=generator).to(parameter.grad.dtype)
            parameter.grad += noise * (level * parameter.grad.abs().max())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
