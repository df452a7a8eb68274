"""The default optimizer and clipping are element-wise bit for bit: the sharding of parameters does not change a
result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.engine.group.gradient_buckets import clip_factor
from shoal_workers.engine.step.gradients import Gradients
from shoal_workers.engine.step.parameter_groups import default_groups, parameters_in
from shoal_workers.engine.step.update import adamw

SIZE = 531
SETTINGS = OptimizerSpec(lr=0.0123, weight_decay=0.07)


def trained(cuts: list[int], columns: int) -> torch.Tensor:
    """Five clipped steps on a matrix of SIZE rows that is cut at these rows."""
    draws = torch.Generator().manual_seed(1)
    start = torch.randn(SIZE, columns, generator=draws)
    pieces = [nn.Parameter(piece.clone()) for piece in start.tensor_split(cuts)]
    if columns == 1:
        pieces = [nn.Parameter(piece.detach().flatten()) for piece in pieces]
    named = [(str(number), piece) for number, piece in enumerate(pieces)]
    optimizer = adamw(parameters_in(default_groups(named, SETTINGS), named), SETTINGS)
    for step in range(5):
        scale = 10 ** torch.randn(SIZE, 1, generator=draws)
        gradient = torch.randn(SIZE, columns, generator=draws) * scale
        for piece, part in zip(pieces, gradient.tensor_split(cuts), strict=True):
            piece.grad = part.reshape(piece.shape).clone()
        Gradients.of((piece, 1.0) for piece in pieces).scale(clip_factor(3.7, 1.1))
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS.lr * (step + 1) / 5
        optimizer.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])


@pytest.mark.parametrize("columns", [1, 3])
def test_any_split_of_the_parameters_gives_the_same_bits(columns: int) -> None:
    whole = trained([], columns)
    for cut in range(1, SIZE, 7):
        assert torch.equal(trained([cut], columns), whole), cut
        assert torch.equal(trained([cut // 3, cut], columns), whole), cut
