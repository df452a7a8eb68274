"""Sets the precision of each module, and casts between modules of different types.

    a module         the precision of the pattern that matches its name; else that of the module that contains it; else
                     the spec's `precision`
    its parameters   fp32 for the optimizer, cast to the module's type when they are gathered: sharding.py gives them a
                     separate group in their unit, so a unit with two types is gathered in two collectives
    its inputs       cast to its type where it differs from that of the module around it
    its results      cast back there, except those of the model's last module, `plan.last[-1]`: logits keep their type

    bf16      x ----------------------> + ---> x      with {"*.norm": fp32}
               \\-> norm (fp32) -> up -> /
                  cast ^     ^ cast

The casts are hooks that are installed before all other axes, so what the axes do at a module's ends sees the type of
the module around it.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import JobSpec, Precision
from shoal_workers.engine.parallel.sharding import CONTAINERS, compute_dtype, mixed_precision
from shoal_workers.torch_internals import tree_map

Precisions = Mapping[str, Precision]
"""Precision by name of a module, for modules that differ from the spec's `precision`."""
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def apply_precisions(model: nn.Module, spec: JobSpec, plan: ParallelPlan) -> Precisions:
    """Install the casts in the whole model, before it is split; return which modules differ from the spec.

    Raises:
        ValueError: a pattern matches no module, two patterns with different types match one module, or two modules of
            different types share a parameter.
    """
    if not spec.module_precision:
        return {}
    _refuse_unmatched(model, spec.module_precision)
    precisions = _resolve_precisions(model, spec)
    _refuse_shared(model, precisions)
    last = plan.last[-1] if plan.last else None
    for name, module in model.named_modules():
        outer = precisions[_find_caller(model, name)] if name else precisions[name]
        if precisions[name] is outer:
            continue
        module.register_forward_pre_hook(partial(_cast_inputs, compute_dtype(precisions[name])), with_kwargs=True)
        if name != last:
            module.register_forward_hook(partial(_cast_results, compute_dtype(outer)))
    return {name: precision for name, precision in precisions.items() if precision is not spec.precision}


def make_policies(
    part: nn.Module, precisions: Precisions, reduction: Precision
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """Make FSDP's policies for the modules of a part whose precision differs from the spec's."""
    return {
        module: mixed_precision(precisions[name], reduction)
        for name, module in part.named_modules()
        if name in precisions
    }


def _resolve_precisions(model: nn.Module, spec: JobSpec) -> dict[str, Precision]:
    precisions = {"": spec.precision}
    for name, _ in model.named_modules(remove_duplicate=False):
        if not name:
            continue
        patterns = {pattern: dtype for pattern, dtype in spec.module_precision.items() if fnmatchcase(name, pattern)}
        if len(set(patterns.values())) > 1:
            pairs = " and ".join(f"{pattern!r} ({dtype})" for pattern, dtype in patterns.items())
            raise ValueError(
                f"module_precision: the module {name!r} matches {pairs}. Write patterns of which one matches it."
            )
        precisions[name] = next(iter(patterns.values()), precisions[name.rpartition(".")[0]])
    return precisions


def _find_caller(model: nn.Module, name: str) -> str:
    """Return the name of the module whose forward calls this one. A container calls none."""
    outer = name.rpartition(".")[0]
    while outer and isinstance(model.get_submodule(outer), CONTAINERS):
        outer = outer.rpartition(".")[0]
    return outer


def _refuse_unmatched(model: nn.Module, patterns: Mapping[str, Precision]) -> None:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"module_precision {pattern!r} matches no module of the model. The nearest names are "
                f"{', '.join(map(repr, nearest))}; `*` stands for any characters."
            )


def _refuse_shared(model: nn.Module, precisions: Mapping[str, Precision]) -> None:
    names_of_parameters: dict[int, dict[Precision, str]] = defaultdict(dict)
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False):
            names_of_parameters[id(parameter)].setdefault(precisions[name], f"{name}.{attribute}")
    for names in names_of_parameters.values():
        if len(names) > 1:
            pairs = " and ".join(f"{name} ({precision})" for precision, name in names.items())
            raise ValueError(
                f"module_precision gives two types to one tied parameter: {pairs}. A parameter is gathered in one "
                "type: give both modules the same."
            )


def _cast_inputs(dtype: torch.dtype, module: nn.Module, arguments: Any, named: Any) -> Any:
    return _cast(arguments, dtype), _cast(named, dtype)


def _cast_results(dtype: torch.dtype, module: nn.Module, arguments: Any, results: Any) -> Any:
    return _cast(results, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda value: value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CASTABLE else value, values
    )
