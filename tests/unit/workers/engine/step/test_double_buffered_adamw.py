"""The same bits as torch.optim.AdamW, written into the other buffer; the previous values do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shoal_workers.engine.step.double_buffered_adamw import DoubleBufferedAdamW

SHAPES = [(7, 5), (64,), (3, 3, 2), (1,)]


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 0.3},
    ]


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """The last parameter has none in every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == len(parameters) - 1 and step % 3 == 2 else gradient


def _state(optimizer: AdamW, parameters: list[nn.Parameter]) -> list[Tensor]:
    kept = [optimizer.state[p] for p in parameters]
    return [t.detach().clone() for p, s in zip(parameters, kept, strict=True) for t in (p, *s.values())]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("alternates", [False, True])
def test_updates_have_the_same_bits_as_those_of_torch(alternates: bool) -> None:
    theirs, ours = _parameters(), _parameters()
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
    expected = AdamW(_groups(theirs), foreach=True, **settings)
    optimizer = DoubleBufferedAdamW(_groups(ours), foreach=True, **settings)
    for step in range(12):
        for parameters, one in ((theirs, expected), (ours, optimizer)):
            _give_gradients(parameters, step)
            if alternates and one is optimizer and step:
                _step_elsewhere(optimizer, ours)
            else:
                one.step()
        assert _same(_state(expected, theirs), _state(optimizer, ours)), step


def _step_elsewhere(optimizer: DoubleBufferedAdamW, parameters: list[nn.Parameter]) -> None:
    """Into memory that holds nonsense; what the operands were in must not change."""
    states = [optimizer.state[p] for p in parameters]
    old = [*parameters, *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]
    before = [tensor.detach().clone() for tensor in old]
    targets = {tensor: torch.full_like(tensor.detach(), torch.nan) for tensor in old}
    optimizer.targets = targets
    optimizer.step()
    assert _same(old, before)
    for tensor, target in targets.items():
        tensor.data = target


def test_a_tensor_without_a_second_buffer_is_updated_in_place() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = DoubleBufferedAdamW([first, second], lr=0.1, foreach=True)
    for parameter in (first, second):
        parameter.grad = torch.ones(3)
    optimizer.step()
    was = first.detach().clone()
    state = optimizer.state[first]
    targets = {tensor: torch.zeros(3) for tensor in (first, state["exp_avg"], state["exp_avg_sq"])}
    optimizer.targets = targets
    for parameter in (first, second):
        parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(first, was)
    assert torch.equal(targets[first], second)
    optimizer.step()
    assert not torch.equal(first, was), "what a step gets is for that step alone"
