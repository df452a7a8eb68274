"""When two results of a step are the same."""

from __future__ import annotations

import math

import pytest
import torch

from shoal_workers.engine.proof.differences import are_near


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_near_themselves_alone(odd: float) -> None:
    one = torch.tensor([1000.0, odd])
    assert are_near(one, one.clone()) and are_near(one, torch.tensor([1000.0 + 1e-4, odd]))
    assert not are_near(one, torch.tensor([1000.0, 1.0])) and not are_near(torch.tensor([1000.0, 1.0]), one)
    assert not are_near(one, torch.tensor([1001.0, odd]))
    assert not are_near(torch.tensor([odd]), torch.tensor([1.0]))
