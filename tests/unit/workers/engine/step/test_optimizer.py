from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal_workers.contract.spec import OptimizerSpec
from shoal_workers.engine.step.update import adamw


def _is_fused(settings: dict[str, Any], *, deterministic: bool = False) -> bool:
    optimizer = adamw(
        [nn.Parameter(torch.ones(2))], OptimizerSpec.model_validate(settings), deterministic=deterministic
    )
    return bool(optimizer.param_groups[0]["fused"])


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_is_not_fused_for_parameters_on_the_cpu(deterministic: bool) -> None:
    assert not _is_fused({}, deterministic=deterministic)


def test_an_explicit_fused_setting_is_used() -> None:
    assert _is_fused({"fused": True})
    assert not _is_fused({"fused": False})
