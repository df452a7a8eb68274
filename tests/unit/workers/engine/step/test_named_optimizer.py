"""The optimizers that a spec names are those of torch, with the groups that the spec describes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, Muon

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.optimizers import _TORCH, NAMED, OptimizerSpec
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.elementwise import why_as_built
from shoal_workers.engine.step.named_optimizer import named_optimizer
from shoal_workers.engine.step.parameter_groups import freeze, groups_of_spec

_OF_THE_SPEC = {"params", "lr", "weight_decay"}
_NOT_OFFERED = {"capturable", "differentiable", "fused"}
"""Graphs of CUDA, gradients of the update, and kernels that round in another way."""


@pytest.mark.parametrize("path", _TORCH)
def test_the_table_has_the_arguments_of_torch(path: str) -> None:
    kind = getattr(torch.optim, path.rpartition(".")[2])
    signature = inspect.signature(kind).parameters
    assert set(_TORCH[path].args) == signature.keys() - _OF_THE_SPEC - _NOT_OFFERED
    decay = signature.get("weight_decay")
    assert _TORCH[path].weight_decay == (None if decay is None else decay.default)


def test_the_arguments_of_adafactor_and_muon_are_those_of_torch() -> None:
    for name, kind, less in (("adafactor", Adafactor, {"foreach"}), ("muon", Muon, {"eps"})):
        taken = inspect.signature(kind).parameters.keys() - _OF_THE_SPEC - less
        assert set(NAMED[name].args) == taken


@pytest.mark.parametrize("name", NAMED)
def test_every_name_has_a_class_that_takes_its_arguments(name: str) -> None:
    module, _, kind = NAMED[name].path.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    signature = inspect.signature(found).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.values())
    assert takes_all or not set(NAMED[name].args) - signature.keys()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.up = nn.Linear(4, 3)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def _made(**settings: Any) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    model, spec = _Model(), OptimizerSpec.model_validate(settings)
    freeze(model, spec)
    optimizer = named_optimizer(Assembly(Layout(), (model,)), spec, groups_of_spec(model, spec))
    return optimizer, {id(parameter): name for name, parameter in model.named_parameters()}


def _seen(optimizer: torch.optim.Optimizer, names: dict[int, str], *keys: str) -> dict[str, tuple[Any, ...]]:
    return {
        names[id(parameter)]: tuple(group[key] for key in keys)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_rates_and_decay_are_those_of_the_first_group_else_those_of_all() -> None:
    groups = [
        {"match": "embed.*", "lr_factor": 0.5},
        {"match": "*.bias", "lr": 0.3, "weight_decay": 0.2},
    ]
    optimizer, names = _made(name="sgd", lr=0.1, weight_decay=0.01, groups=groups)
    assert _seen(optimizer, names, "lr", "weight_decay") == {
        "embed.weight": (0.05, 0.01),
        "up.weight": (0.1, 0.01),
        "up.bias": (0.3, 0.2),
    }


def test_frozen_parameters_are_in_no_group_and_without_gradient() -> None:
    optimizer, names = _made(name="lion", groups=[{"match": "up.*", "frozen": True}])
    assert _seen(optimizer, names, "weight_decay") == {"embed.weight": (0.1,)}
    with pytest.raises(ValueError, match="matches no parameter of the model"):
        _made(name="lion", groups=[{"match": "down.*", "frozen": True}])


def test_muon_has_the_matrices_that_are_no_embedding_and_what_a_group_says() -> None:
    optimizer, names = _made(name="muon")
    assert _seen(optimizer, names, "is_muon") == {"embed.weight": (False,), "up.weight": (True,), "up.bias": (False,)}
    groups = [{"match": "embed.*", "muon": True}, {"match": "up.*", "muon": False}]
    optimizer, names = _made(name="muon", groups=groups)
    assert _seen(optimizer, names, "is_muon") == {"embed.weight": (True,), "up.weight": (False,), "up.bias": (False,)}


@pytest.mark.parametrize("name", [name for name in NAMED if name != "adamw"])
def test_all_but_those_of_whole_tensors_are_known_to_be_elementwise(name: str) -> None:
    optimizer, _ = _made(name=name)
    is_elementwise = OptimizerSpec(name=name).is_elementwise
    assert bool(why_as_built(optimizer, is_split=True)) is not is_elementwise is (name not in ("muon", "adafactor"))


class Own(torch.optim.SGD):
    """A class as users write them."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.defaults["scale"] = scale


def test_a_class_by_its_path_gets_its_arguments_and_says_what_it_has() -> None:
    path = f"{__name__}:Own"
    optimizer, names = _made(name=path, lr=0.2, args={"scale": 2.0})
    assert isinstance(optimizer, Own) and optimizer.defaults["scale"] == 2.0
    assert {rate for (rate,) in _seen(optimizer, names, "lr").values()} == {0.2}
    with pytest.raises(ValueError, match=r"optimizer.args.size is not an argument of .*Own. It has scale."):
        _made(name=path, args={"size": 2.0})
    with pytest.raises(ValueError, match="has no weight_decay"):
        _made(name=path, weight_decay=0.1)
    with pytest.raises(ValueError, match="cannot be imported here"):
        _made(name="no_such_module.Own")
    with pytest.raises(ValueError, match=r"torch.optim.SGD refuses them: Invalid momentum value: -1"):
        _made(name="torch.optim.SGD", args={"momentum": -1})
