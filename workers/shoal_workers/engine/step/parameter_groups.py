"""Parameter groups of a task's optimizer under a pipeline: those that it makes of the whole model.

A task divides `model.parameters()` by position, by name, or by depth. A stage has a part of the parameters, and two
stages on one rank have other names, so the task would make other groups of them. Therefore its `build_optimizer` is
asked once with the whole model, before it is split, and what it makes of the stages gets these groups. Called by
`build_runtime` and `build_update`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal_workers.engine.parallel.assembly import Assembly


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One group of an optimizer of the whole model."""

    names: tuple[str, ...]
    settings: dict[str, Any]


class NoParameters(Optimizer):
    """In the place of a task's optimizer where a rank's stages are frozen: torch's own refuse to have no parameter."""

    def __init__(self, groups: list[ParameterGroup]) -> None:
        super().__init__([{"params": [], **group.settings} for group in groups], {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing to do."""


def groups_of(optimizer: Optimizer, model: nn.Module) -> list[ParameterGroup]:
    """`optimizer`: of the whole `model`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        ParameterGroup(
            tuple(names[id(parameter)] for parameter in group["params"] if id(parameter) in names),
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
        )
        for group in optimizer.param_groups
    ]


def regroup(optimizer: Optimizer, groups: list[ParameterGroup], assembly: Assembly) -> None:
    """Give an optimizer of this rank's stages the groups of the whole model, in place. Some may have no parameter
    here."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    by_name: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in assembly.all_parameters():
        if id(parameter) in own:
            by_name[name].append(parameter)
    optimizer.param_groups[:] = [
        {"params": [one for name in group.names for one in by_name[name]], **group.settings} for group in groups
    ]
