"""Which gradients are compared by value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.engine.group.gradient_buckets import GradientBuckets


def test_the_gradients_of_a_large_model_are_compared_in_turn_and_those_of_a_small_one_all() -> None:
    group: Any = None  # nothing is sent
    large: list[Tensor] = [nn.Parameter(torch.empty(1 << 20)) for _ in range(5)]
    buckets = GradientBuckets(large, group)
    compared = []
    for _ in range(3):
        compared.append({number for number, one in enumerate(large) if id(one) in buckets._compared})
        buckets.begin()
    assert compared == [{0, 1}, {2, 3}, {4, 0}]
    assert not buckets.are_all_compared
    assert GradientBuckets(large[:2], group).are_all_compared
