"""The groups of an optimizer's parameters, by the names of the whole model.

A task divides `model.parameters()` by position, by name, or by depth. A pipeline stage has a part of the parameters,
and two stages on one rank have other names, so the task would make other groups of them. Therefore its
`build_optimizer` is asked once with the whole model, before it is split (`groups_of`), and what it makes of the stages
gets these groups (`regroup`). Those of a spec's optimizer (`groups_of_spec`) are made of the whole model, too: whether
a pattern matches, and what is an embedding, a stage does not know.

Each rank has all groups in the same order, some perhaps without a parameter. Called by `build_runtime` and
`build_update`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal_workers.contract.optimizers import (
    MUON,
    OptimizerGroup,
    OptimizerSpec,
    describe_unmatched,
    find_group,
    find_named_optimizer,
)
from shoal_workers.engine.parallel.assembly import Assembly


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One group of an optimizer of the whole model."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def freeze(model: nn.Module, settings: OptimizerSpec) -> None:
    """Switches off the gradients of frozen groups, before the model is split. ValueError if one matches nothing."""
    named = dict(model.named_parameters())
    if settings.groups and (message := describe_unmatched(settings.groups, list(named))):
        raise ValueError(message)
    for name, parameter in named.items():
        number = find_group(settings.groups, name)
        if number is not None and settings.groups[number].frozen:
            parameter.requires_grad_(False)


def groups_of_spec(model: nn.Module, settings: OptimizerSpec) -> list[ParameterGroup]:
    """`model`: the whole one. Of each group of the spec, and of what is left, those with and those without decay."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    return list(_groups(model.named_parameters(), settings, embeddings))


def default_groups(named: Iterable[tuple[str, Tensor]], settings: OptimizerSpec) -> list[ParameterGroup]:
    """Those of a spec without groups: weight decay on parameters of two or more dimensions only."""
    return list(_groups(named, settings, set()))


def _groups(
    named: Iterable[tuple[str, Tensor]], settings: OptimizerSpec, embeddings: set[int]
) -> Iterator[ParameterGroup]:
    members_by_group: dict[int | None, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in named:
        if parameter.requires_grad:
            members_by_group[find_group(settings.groups, name)].append((name, parameter))
    rules: list[tuple[int | None, OptimizerGroup | None]] = [*enumerate(settings.groups), (None, None)]
    for number, group in rules:
        if group is not None and group.frozen:
            continue
        rate = _rate(group, settings)
        decay = None if group is None else group.weight_decay
        members = members_by_group[number]
        if settings.name == MUON:
            allowed = None if group is None else group.muon
            matrices = {
                name
                for name, tensor in members
                if tensor.ndim == 2 and (allowed if allowed is not None else id(tensor) not in embeddings)
            }
            yield ParameterGroup(
                tuple(name for name, _ in members if name in matrices),
                {"lr": rate, "weight_decay": settings.weight_decay if decay is None else decay, "is_muon": True},
            )
            members = [(name, tensor) for name, tensor in members if name not in matrices]
        for has_decay in (True, False):
            names = tuple(name for name, tensor in members if (tensor.ndim >= 2) is has_decay)
            own_decay = (settings.weight_decay if has_decay else 0.0) if decay is None else decay
            yield ParameterGroup(names, {"lr": rate, **_decay(settings, own_decay)})


def _decay(settings: OptimizerSpec, value: float) -> dict[str, float]:
    named = find_named_optimizer(settings.name)
    if named is not None:
        return {} if named.weight_decay is None else {"weight_decay": value}
    return {"weight_decay": value} if value or settings.weight_decay else {}


def _rate(group: OptimizerGroup | None, settings: OptimizerSpec) -> float:
    if group is None:
        return settings.lr
    return group.lr if group.lr is not None else settings.lr * (group.lr_factor or 1.0)


def parameters_in(groups: Sequence[ParameterGroup], named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """The groups as an optimizer takes them, with this rank's parameters. `named`: may have a name several times."""
    by_name: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named:
        by_name[name].append(parameter)
    return [
        {"params": [tensor for name in group.names for tensor in by_name[name]], **group.settings} for group in groups
    ]


class NoParameters(Optimizer):
    """Replaces a task's optimizer where a rank's stages are frozen: torch's own refuse to have no parameter."""

    def __init__(self, groups: list[ParameterGroup]) -> None:
        super().__init__([{"params": [], **group.settings} for group in groups], {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing."""


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
    group_by_id = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.param_groups[:] = parameters_in(
        groups, (row for row in assembly.all_parameters() if id(row[1]) in group_by_id)
    )
