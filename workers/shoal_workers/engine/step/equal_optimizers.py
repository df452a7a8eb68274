"""Makes another optimizer that is equal to a given one: of its class, with its settings, over other parameters.

A task's optimizer gets parameter groups from its constructor, and its defaults by name, as those of torch do
(docs/tasks.md).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

_NOT_SETTINGS = ("params", "param_names", "initial_lr")


def rebuild(kind: type[Optimizer], groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
    """Makes another optimizer of this class. `groups`: with their parameters. Raises what the constructor raises."""
    taken = inspect.signature(kind).parameters
    takes_all = any(record.kind is inspect.Parameter.VAR_KEYWORD for record in taken.values())
    return kind(list(groups), **{name: value for name, value in defaults.items() if takes_all or name in taken})


def class_of(path: str) -> type[Optimizer]:
    """ValueError if no such optimizer can be imported here."""
    module_name, _, name = path.partition(":")
    try:
        attribute: Any = importlib.import_module(module_name)
        for part in name.split("."):
            attribute = getattr(attribute, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the optimizer {path} cannot be imported here: {error}") from None
    if not (isinstance(attribute, type) and issubclass(attribute, Optimizer)):
        raise ValueError(f"{path} is not a torch.optim.Optimizer")
    return attribute


def settings_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group, without its parameters; with its peak rate."""
    return [
        {key: value for key, value in group.items() if key not in _NOT_SETTINGS} for group in optimizer.param_groups
    ]
