"""The optimizer that a spec names, and which settings of its groups are state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.engine.step.update import adamw, changes, differing, is_plain, plain_settings, restored


def test_only_what_a_run_has_changed_is_saved_with_the_value_that_was_built() -> None:
    built = {"weight_decay": 0.1, "betas": [0.9, 0.95], "k": 0}
    assert changes(built, dict(built)) == {}
    assert changes(built, built | {"k": 7, "seen": True}) == {"k": [0, 7], "seen": [True]}


@pytest.mark.parametrize(
    ("built", "changed", "expected"),
    [
        ({"decay": 0.1}, {}, {"decay": 0.1}),
        ({"decay": 0.2}, {}, {"decay": 0.2}),
        ({"decay": 0.1}, {"decay": [0.1, 0.5]}, {"decay": 0.5}),
        ({"decay": 0.2}, {"decay": [0.1, 0.5]}, {"decay": 0.2}),
        ({"decay": 0.1}, {"seen": [True]}, {"decay": 0.1, "seen": True}),
        ({"decay": 0.1, "seen": False}, {"seen": [True]}, {"decay": 0.1, "seen": False}),
        ({}, {"decay": [0.1, 0.5]}, {}),
    ],
    ids=["plain", "built otherwise", "changed by the run", "both", "added", "added and built now", "no longer built"],
)
def test_what_is_built_now_acts_and_what_the_run_has_changed_is_kept(
    built: dict[str, Any], changed: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert restored(built, changed) == expected


def test_rates_implementations_and_tensors_are_never_saved() -> None:
    group = {"params": [1], "lr": 0.1, "initial_lr": 0.2, "fused": True, "foreach": None, "scale": object(), "k": 1}
    assert plain_settings(group) == {"initial_lr": 0.2, "k": 1}
    assert is_plain((0.9, 0.99)) and not is_plain([object()])


def test_settings_that_an_earlier_version_saved_are_named_if_they_differ() -> None:
    assert differing({"betas": [0.9, 0.95], "eps": 1.0}, {"eps": 2.0, "k": 1}) == ("eps",)


def _is_fused(settings: dict[str, Any], *, deterministic: bool = False) -> bool:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}]
    optimizer = adamw(groups, OptimizerSpec.model_validate(settings), deterministic=deterministic)
    return bool(optimizer.param_groups[0]["fused"])


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_is_not_fused_for_parameters_on_the_cpu(deterministic: bool) -> None:
    assert not _is_fused({}, deterministic=deterministic)


def test_an_explicit_fused_setting_is_used() -> None:
    assert _is_fused({"fused": True})
    assert not _is_fused({"fused": False})
