"""Makes the optimizer that a spec names, over the parameters of a sharded model, like a task's `build_optimizer`.

What is elementwise then runs on the local shards, as a task's own does: see update.py and elementwise.py.
The built-in AdamW is made elsewhere, see `default_update`. Called by `build_update`.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch.optim import Optimizer

from shoal_workers.contract.islands import IslandsSpec
from shoal_workers.contract.optimizers import ADAMW, OptimizerSpec, find_named_optimizer
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.averaged_weights import Averaging
from shoal_workers.engine.step.merging import Merging
from shoal_workers.engine.step.parameter_groups import ParameterGroup, parameters_in
from shoal_workers.engine.task.task import needs_arguments


def named_optimizer(
    assembly: Assembly, settings: OptimizerSpec, groups: list[ParameterGroup], islands: IslandsSpec | None = None
) -> Optimizer:
    """`groups`: of the whole model. ValueError, for the user, if there is no such class or it refuses its arguments."""
    named = find_named_optimizer(settings.name)
    path = (named.path if named is not None else settings.name).replace(":", ".")
    module, _, name = path.rpartition(".")
    try:
        kind = _class_of(module, name)
    except ValueError as error:
        raise ValueError(f"optimizer.name {settings.name}: {error}") from None
    arguments = _arguments(settings, kind)
    own = parameters_in(groups, assembly.all_parameters())
    try:
        optimizer = kind(own, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.args {settings.args}: {settings.name} refuses them: {error}") from None
    if needs_arguments(optimizer.step):
        raise ValueError(
            f"optimizer.name {settings.name}: its step() needs a closure that computes the loss several times, and "
            "Shoal computes it once for each step. Use an optimizer whose step() needs none."
        )
    if islands is not None:
        return Merging(optimizer, keeps_residual=islands.compress != "none")
    if settings.ema_decay is None:
        return optimizer
    return Averaging(optimizer, ema_decay=settings.ema_decay)


def _class_of(module_name: str, name: str) -> type[Optimizer]:
    """ValueError if no such optimizer can be imported here."""
    path = f"{module_name}:{name}"
    try:
        attribute: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the optimizer {path} cannot be imported here: {error}") from None
    if not (isinstance(attribute, type) and issubclass(attribute, Optimizer)):
        raise ValueError(f"{path} is not a torch.optim.Optimizer")
    return attribute


def _arguments(settings: OptimizerSpec, kind: type[Optimizer]) -> dict[str, Any]:
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.args.items()
    }
    named = find_named_optimizer(settings.name)
    if named is not None and named.keys:
        given |= {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.name == ADAMW and settings.fused is True:
        given["fused"] = True
    if named is not None:
        return {"lr": settings.lr, **given}
    taken = inspect.signature(kind).parameters
    if any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in taken.values()):
        return given
    if unknown := given.keys() - taken.keys():
        has = ", ".join(name for name in list(taken)[1:] if name not in ("lr", "weight_decay")) or "none"
        raise ValueError(f"optimizer.args.{min(unknown)} is not an argument of {settings.name}. It has {has}.")
    if settings.weight_decay and "weight_decay" not in taken:
        raise ValueError(
            f"optimizer.weight_decay is {settings.weight_decay}, and {settings.name} has no weight_decay. Remove it."
        )
    return given | ({"lr": settings.lr} if "lr" in taken else {})
