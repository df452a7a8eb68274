"""engine/model/build.py: a whole model that does not fit is refused while it is built."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from shoal_workers.engine.model.build import ModelTooLarge, refused_if_too_large

MIB = 1 << 20


def _layers(number: int) -> nn.Module:
    """Layers of 8 MiB each."""
    return nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(number))


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    left = iter([200 * MIB, 135 * MIB])
    words = (
        "after 120 MiB of parameters, weight of Linear takes 8 MiB and 128 MiB are kept free, but 135 MiB are left. "
        "Every worker builds the whole model"
    )
    with pytest.raises(ModelTooLarge, match=re.escape(words)), refused_if_too_large(lambda: next(left)):
        _layers(20)
    assert next(left, None) is None


def test_other_models_are_not_looked_at_afterwards() -> None:
    with refused_if_too_large(lambda: 0):
        nn.Linear(10, 10)
    assert isinstance(nn.Parameter(torch.empty(32 * MIB)), nn.Parameter) and len(list(_layers(9).parameters())) == 9
