"""Whether a task's optimizer treats each parameter alike in a stage of a pipeline and in the whole model.

`build_optimizer` gets the parameters that a rank has. Groups by name or shape are the same in every stage; groups by
position (the first half of `model.parameters()`) are not, and the job would train another model than one process.
Called by `build_runtime`: before the model is split, and after the optimizer is built. It never changes either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

Settings = Mapping[str, Mapping[str, str]]
"""Name of a parameter -> the settings of its group, as text."""
_NOT_COMPARED = ("params", "initial_lr", "param_names")


def settings_by_name(optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> Settings:
    """Of the parameters that the optimizer updates."""
    names = {id(parameter): name for name, parameter in named}
    return {
        names[id(parameter)]: settings_of(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def settings_of(group: Mapping[str, Any]) -> Mapping[str, str]:
    """Of a parameter group, as text."""
    return {key: str(value) for key, value in group.items() if key not in _NOT_COMPARED}


def other_settings(whole: Settings, stage: Settings, names: Iterable[str], place: str) -> str:
    """In words: a parameter that has other settings in the stage than in the whole model, or that only one of the two
    updates. Empty: there is none. `names`: the stage's parameters; `place`: the line of `build_optimizer`."""
    for name in names:
        one, other = whole.get(name), stage.get(name)
        if one != other:
            return (
                f"{place}: build_optimizer() gives {name} {_words(one, other)} in the whole model, and "
                f"{_words(other, one)} in a stage of a pipeline, where model.parameters() are those of the stage. "
                "Choose groups by the parameters' names or shapes, not by their position, or set parallelism.pp to 1."
            )
    return ""


def _words(settings: Mapping[str, str] | None, other: Mapping[str, str] | None) -> str:
    if settings is None:
        return "no update"
    differing = {key: value for key, value in settings.items() if other is None or other.get(key) != value}
    return ", ".join(f"{key} {value}" for key, value in differing.items()) or "other settings"
