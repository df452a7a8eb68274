"""Parameter groups of a task's optimizer in a stage of a pipeline: by shape they are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal_workers.engine.step.stage_groups import other_settings, settings_by_name

Build = Callable[[nn.Module], torch.optim.Optimizer]


def _by_shape(model: nn.Module) -> torch.optim.Optimizer:
    flat = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.SGD(
        [{"params": flat, "lr": 0.1}, {"params": [p for p in model.parameters() if p.ndim == 2]}], 0.2
    )


def _by_position(model: nn.Module) -> torch.optim.Optimizer:
    own = list(model.parameters())
    return torch.optim.SGD([{"params": own[: len(own) // 2], "lr": 0.1}, {"params": own[len(own) // 2 :]}], lr=0.2)


def _without_the_last(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[:-1], lr=0.2)


def _compared(build: Build) -> str:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    stage = nn.Sequential(*model[:2])
    names = [name for name, _ in stage.named_parameters()]
    whole = settings_by_name(build(model), model.named_parameters())
    return other_settings(whole, settings_by_name(build(stage), stage.named_parameters()), names, "task.py:7")


def test_groups_by_shape_are_the_same_in_every_stage() -> None:
    assert _compared(_by_shape) == ""


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_by_position, "1.weight lr 0.1 in the whole model, and lr 0.2 in a stage"),
        (_without_the_last, "and no update in"),
    ],
)
def test_groups_by_position_are_refused(build: Build, words: str) -> None:
    found = _compared(build)
    assert found.startswith("task.py:7: build_optimizer() gives ") and words in found
