"""Which modules get a fully_shard of their own if the task does not define them: the repeated blocks of a model.

A unit's parameters are gathered before its forward and freed after it, so units should be the blocks that run one after
the other. All other parameters belong to the root. Called by `LoadedTask.shard_units`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def default_shard_units(model: nn.Module) -> list[nn.Module]:
    """Children of every nn.ModuleList, and children of every nn.Sequential that are themselves made of modules.

    The root gets containers (they have no forward of their own), children without parameters, and children that share a
    parameter with a module outside of them (tied weights must be gathered together).
    """
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(module)
    return [unit for unit in dict.fromkeys(_blocks(model)) if _is_closed(unit, owners)]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from (child for child in module if not isinstance(child, _CONTAINERS))
        elif isinstance(module, nn.Sequential):
            yield from (child for child in module if any(True for _ in child.children()))


def _is_closed(unit: nn.Module, owners: dict[int, set[nn.Module]]) -> bool:
    inside = set(unit.modules())
    parameters = list(unit.parameters())
    return bool(parameters) and all(owners[id(parameter)] <= inside for parameter in parameters)
