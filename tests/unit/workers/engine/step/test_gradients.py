"""Parameters that no rank has used have no gradient."""

from __future__ import annotations

import torch
from torch import nn

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.update import Update


def test_a_parameter_that_the_optimizer_lacks_keeps_no_gradient() -> None:
    model = nn.Linear(2, 2)
    update = Update(Assembly(fully_sharded(1), (model,)), torch.optim.SGD([model.weight], lr=0.1), ())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.ones(2)), "it would add up"
        update.step(1.0)
        assert model.weight.grad is None and model.bias.grad is None
