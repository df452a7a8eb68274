"""An optimizer as data, so that another process of the job can make an equal one: class, defaults, settings of groups.

    class       by its name, "module:Class"; every worker of a job can import the modules of its task
    settings    of each parameter group; JSON, exact for every number

Only for optimizers whose task declares them pure and elementwise (docs/tasks.md). Their constructor takes parameter
groups, and their defaults by name, as those of torch do. Called by the engine, which writes a log, and by `rules`.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from shoal_workers.snapshot_store.log.records import LoggedOptimizer

_NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr")
"""A commit has the rates of its step."""


def describe(optimizer: Optimizer) -> LoggedOptimizer:
    """ValueError, with the reason, if no other process can make an equal one."""
    kind = type(optimizer)
    path = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in path or kind.__module__ == "__main__":
        raise ValueError(f"{kind.__qualname__} is not defined at the top of a module")
    groups = tuple(_exact(_settings(group)) for group in optimizer.param_groups)
    return LoggedOptimizer(path=path, defaults=_exact(optimizer.defaults), groups=groups)


def rebuild(kind: type[Optimizer], groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
    """Another one of this class. `groups`: with their parameters. Raises what the constructor raises."""
    taken = inspect.signature(kind).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    return kind(list(groups), **{name: value for name, value in defaults.items() if takes_all or name in taken})


def class_of(path: str) -> type[Optimizer]:
    """ValueError if no such optimizer can be imported here."""
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the optimizer {path} cannot be imported here: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(f"{path} is not a torch.optim.Optimizer")
    return found


def settings_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, without its parameters; with its peak rate."""
    return [{**_settings(group), "lr": group["lr"]} for group in optimizer.param_groups]


def plain_settings_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The same without the rate: what no step and no schedule may change."""
    return [_settings(group) for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS}


def _exact(settings: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a setting of the optimizer is not plain JSON: {error}") from None
    return text
