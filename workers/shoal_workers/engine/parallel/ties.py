"""Ties: parameters and buffers that are one tensor under several names, and what the axes may do to them.

    found       in the whole model, before it is split: one tensor object with several names. `plan.tied` may name them,
                and must not name others
    name        the first one, in the model's order, in every layout; checkpoints hold the tensor once under it
    in a stage  it stays one tensor object
    on stages   each stage has a copy; their gradients are summed by name (step/gradients.py). The same holds
                for a tensor of a module that no stage owns, so that each stage has the module

Pure functions of modules; every rank has built the same model, so all ranks find the same. Called by `assemble`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from shoal_workers.contract.model import ParallelPlan, TensorStyle
from shoal_workers.engine.parallel.cutting import take_attributes
from shoal_workers.engine.parallel.names import matching

_SHOWN = 4


def find_ties(model: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """Every further name of a parameter or buffer -> its first name.

    Raises:
        ValueError: `plan.tied` names what is not one tensor.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    # A parameter's first name is that of `named_parameters`.
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    for name, tensor in tensors.items():
        if first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    for alias, owner in plan.tied.items():
        unknown = [name for name in (alias, owner) if name not in tensors]
        if unknown:
            raise ValueError(
                f"plan.tied says that {alias} is {owner}, but the model has no parameter {' and no '.join(unknown)}. "
                "Names are as in model.named_parameters()."
            )
        if tensors[alias] is not tensors[owner]:
            raise ValueError(
                f"plan.tied says that {alias} is {owner}, but build_model returned a model in which they are two "
                "parameters. Assign one to the other in build_model, or take the entry out of plan.tied."
            )
    return ties


def refuse_mixed_cuts(model: nn.Module, plan: ParallelPlan, ties: Mapping[str, str], *, tp: int, ep: int) -> None:
    """One tensor is cut in one way only. `model` is whole.

    Raises:
        ValueError: the plan cuts it differently under its different names.
    """
    if not ties:
        return
    cuts = _cuts(model, plan, tp=tp, ep=ep)
    for alias, owner in ties.items():
        cut, other = cuts.get(owner, _WHOLE), cuts.get(alias, _WHOLE)
        if cut != other:
            raise ValueError(
                f"{owner} and {alias} are one parameter, and plan.{'tensor' if tp > 1 else 'experts'} treats them "
                f"differently: {owner} is {cut}, {alias} is {other}. {_way_out(owner, alias, cuts)}"
            )


def untie_parts(parts: Sequence[nn.Module]) -> None:
    """Give each of a rank's parts (stages) modules and parameters of its own, in place: each gathers and frees its own.

    Buffers stay shared: nothing is gathered. The containers of the parts must be different objects already."""
    seen_modules: set[int] = set()
    seen_parameters: set[int] = set()
    for part in parts:
        clones: dict[int, nn.Module] = {}
        _own_modules(part, seen_modules, clones)
        parameters_by_id: dict[int, nn.Parameter] = {}
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in seen_parameters:
                    continue
                if id(parameter) not in parameters_by_id:
                    fresh = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    parameters_by_id[id(parameter)] = take_attributes(fresh, parameter)
                module._parameters[name] = parameters_by_id[id(parameter)]
        seen_modules.update(map(id, part.modules()))
        seen_parameters.update(map(id, part.parameters()))


def stages_with(stages: Mapping[int, nn.Module], ties: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """First name -> the stages, of all of a pipeline, that have the parameter; of those that several have."""
    stages_by_name: dict[str, list[int]] = {}
    for index, module in sorted(stages.items()):
        for name in dict.fromkeys(ties.get(name, name) for name, _ in module.named_parameters()):
            stages_by_name.setdefault(name, []).append(index)
    return {name: tuple(indices) for name, indices in stages_by_name.items() if len(indices) > 1}


_WHOLE = "whole on every tp rank"


def _cuts(model: nn.Module, plan: ParallelPlan, *, tp: int, ep: int) -> dict[str, str]:
    """What tp and ep do to parameters, in words, by every name."""
    cuts: dict[str, str] = {}
    for pattern, style in plan.tensor.items() if tp > 1 else ():
        for name, module in _matching_all(model, pattern):
            match style:
                case TensorStyle.COLUMN | TensorStyle.HEAD | TensorStyle.EMBEDDING:
                    cuts.update({f"{name}.{own}": "split along dim 0" for own in module._parameters})
                case TensorStyle.ROW:
                    cuts[f"{name}.weight"] = "split along dim 1"
                case TensorStyle.SEQUENCE | TensorStyle.PARTIAL:
                    for own, _ in module.named_parameters(remove_duplicate=False):
                        cuts[f"{name}.{own}"] = f"whole, with a gradient that is summed over tp (style {style})"
                case TensorStyle.GATHER | TensorStyle.WHOLE:
                    pass
    if ep > 1 and plan.experts:
        for name, module in _matching_all(model, plan.experts):
            for own, _ in module.named_parameters(remove_duplicate=False):
                cuts[f"{name}.{own}"] = "split into experts"
    return cuts


def _way_out(owner: str, alias: str, cuts: Mapping[str, str]) -> str:
    cut = [name for name in (owner, alias) if "split" in cuts.get(name, "")]
    if len(cut) == 1:
        other = alias if cut[0] == owner else owner
        module, of_cut = other.rpartition(".")[0], cut[0].rpartition(".")[0]
        return (
            f"Give {module} a style that splits it in the same way (an embedding and its head have the styles "
            f"'embedding' and 'head'), or take {of_cut} out of plan.tensor."
        )
    return "Take one of them out of plan.tensor, or do not tie them."


def _matching_all(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Matches as `matching` does, with every name of a module that has several."""
    known = {id(module) for _, module in matching(model, pattern)}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in known:
            yield name, module


def _own_modules(module: nn.Module, seen: set[int], clones: dict[int, nn.Module]) -> None:
    """Replace the submodules that an earlier part has, and that have parameters, by shallow copies."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) in clones:
            module._modules[name] = clones[id(child)]
            continue
        own = child
        if id(child) in seen and any(True for _ in child.parameters()):
            own = shallow_copy(child)
            module._modules[name] = own
        clones[id(child)] = own
        _own_modules(own, seen, clones)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module with dicts of its own and the same parameters, buffers, hooks and children."""
    clone = copy.copy(module)
    for key, value in vars(clone).items():  # hooks, parameters and children are kept in dicts
        if isinstance(value, dict):
            vars(clone)[key] = copy.copy(value)
    return clone
