"""The learning rate over the steps: what a spec can say of it. engine/schedule.py computes it.

    a name      cosine, linear, constant ...: with keys of their own
    a path      torch.optim.lr_scheduler.CyclicLR, package.module.Class: a scheduler, made with `args`

A spec is checked without torch, so the arguments of torch's schedulers stand here in a table, which a test compares
with torch. The document of a schedule by name is that of earlier releases. Pure.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.config import JsonDict

from shoal_workers.contract.base import PositiveInt, if_set, whole
from shoal_workers.contract.rules import Rule, Section

_NAMES = ("cosine", "linear", "constant", "wsd", "inverse_sqrt", "one_cycle", "step", "polynomial")
_TORCH = "torch.optim.lr_scheduler"
ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ConstantLR": ((), ("factor", "total_iters")),
    "CosineAnnealingLR": (("T_max",), ("eta_min",)),
    "CosineAnnealingWarmRestarts": (("T_0",), ("T_mult", "eta_min")),
    "CyclicLR": (("base_lr", "max_lr"), ("step_size_up", "step_size_down", "mode", "gamma", "scale_mode")),
    "ExponentialLR": (("gamma",), ()),
    "LinearLR": ((), ("start_factor", "end_factor", "total_iters")),
    "MultiStepLR": (("milestones",), ("gamma",)),
    "OneCycleLR": (
        ("max_lr", "total_steps"),
        ("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase"),
    ),
    "PolynomialLR": ((), ("total_iters", "power")),
    "StepLR": (("step_size",), ("gamma",)),
}
"""Schedulers of torch: arguments that are required, and others."""
_REFUSED = {
    "ReduceLROnPlateau": "it follows losses, and a rate is a function of the step alone. Use validation.patience",
    "LambdaLR": "its argument is a function. Write a scheduler class, and name its path",
    "MultiplicativeLR": "its argument is a function. Write a scheduler class, and name its path",
    "SequentialLR": "its arguments are schedulers. Write a scheduler class, and name its path",
    "ChainedScheduler": "its arguments are schedulers. Write a scheduler class, and name its path",
}
_PATH = r"[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*[.:][A-Za-z_][A-Za-z0-9_]*"
_OF_TORCH = r"torch[.]optim[.]lr_scheduler[.:]"
_NAME = whole("|".join((*_NAMES, rf"{_OF_TORCH}({'|'.join(ARGUMENTS)})", rf"(?!{_OF_TORCH}\w+$){_PATH}")))
_OF_NAMES = ("min_lr_ratio", "steps", "decay_steps", "power", "every_steps", "factor")
"""Keys that a path does not have."""
_SCHEDULE_OF = {"decay_steps": "wsd", "power": "polynomial", "every_steps": "step"}
"""The schedule to which a key belongs."""


_RULES: JsonDict = {
    "allOf": [
        *(
            if_set(key, {"required": ["name"], "properties": {"name": {"const": name}}})
            for key, name in _SCHEDULE_OF.items()
        ),
        {
            "if": {"required": ["name"], "properties": {"name": {"const": "step"}}},
            "then": {"required": ["every_steps"], "properties": {"every_steps": {"not": {"type": "null"}}}},
        },
        {
            "if": {"properties": {"name": {"enum": [*_NAMES]}}},
            "then": {"properties": {"args": {"maxProperties": 0}}},
            "else": {"properties": dict.fromkeys(_OF_NAMES, False)},
        },
    ]
}


def _refuse_elsewhere(key: str, name: str) -> Rule[Any]:
    """Make the rule that a key belongs to the schedule of one name."""
    return Rule(
        lambda schedule: getattr(schedule, key) is not None and schedule.name != name,
        lambda schedule: (
            f"schedule.{key} belongs to schedule.name: {name}, and schedule.name is {schedule.name}. Set schedule.name "
            f"to {name}, or remove schedule.{key}."
        ),
    )


class ScheduleSpec(Section):
    """Learning rate over the steps: linear warm-up, then the named course until the last step."""

    model_config = ConfigDict(json_schema_extra=_RULES)

    name: str = Field("cosine", max_length=255, json_schema_extra={"pattern": _NAME})
    """Course after the warm-up. constant: no decay; wsd: constant, then linear over the last steps (Hu et al. 2024);
    inverse_sqrt: with the root of the steps (Vaswani et al. 2017); one_cycle: a warm-up along a cosine from 1/25 of the
    peak, then cosine (Smith & Topin 2018); step: lower by a factor, again and again; polynomial: linear to a power. Or
    the path of a scheduler, for example torch.optim.lr_scheduler.CosineAnnealingWarmRestarts."""
    warmup_steps: int = Field(10, ge=0, le=2**53)
    """Optimizer steps over which the learning rate rises to its peak. Where it is not set, it is 0 for a path."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The decay ends at this fraction of the peak learning rate."""
    steps: PositiveInt | None = None
    """Optimizer steps until the end of the decay, warm-up included; null: those of `stop`. A job that is extended keeps
    its learning rates up to then only with a value here, or with the schedule constant, inverse_sqrt or step."""
    decay_steps: PositiveInt | None = None
    """wsd: optimizer steps of the decay; null: a fifth of all."""
    power: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    """polynomial: exponent of what is left of the decay; null: 2."""
    every_steps: PositiveInt | None = None
    """step: optimizer steps after the warm-up until the rate is multiplied by `factor` once more."""
    factor: float = Field(0.1, gt=0, le=1)
    """step: what the rate is multiplied by."""

    args: dict[str, Any] = Field(default_factory=dict, max_length=32)
    """Arguments of a scheduler by its path: {T_0: 10}. Rates among them (eta_min, max_lr) are multiples of
    `optimizer.lr`."""

    @model_validator(mode="before")
    @classmethod
    def _is_of_its_name(cls, document: Any) -> Any:
        name = document.get("name", "cosine") if isinstance(document, dict) else None
        if not isinstance(name, str) or len(name) > 255:
            return document
        args = document.get("args")
        if name in _NAMES:
            if args and isinstance(args, dict):
                raise ValueError(
                    f"schedule.args belongs to a scheduler by its path, and schedule.name is {name}. Remove "
                    "schedule.args, or set schedule.name to a path, for example torch.optim.lr_scheduler.CyclicLR."
                )
            return document
        _refuse_path(name)
        for key in _OF_NAMES:
            if key in document:
                raise ValueError(
                    f"schedule.{key} does not belong to a scheduler by its path, {name}. Its settings are in "
                    "schedule.args."
                )
        _refuse_arguments(name, {} if args is None else args)
        return {"warmup_steps": 0} | document

    rules = (
        *(_refuse_elsewhere(key, name) for key, name in _SCHEDULE_OF.items()),
        Rule(
            lambda schedule: schedule.name == "step" and schedule.every_steps is None,
            "schedule.name is step, which needs schedule.every_steps: how often the rate falls.",
        ),
    )

    @model_serializer(mode="wrap")
    def _without_what_it_does_not_read(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        document = handler(self)
        for key in _OF_NAMES if self.is_path else ("args",):
            document.pop(key, None)
        return document

    @property
    def is_path(self) -> bool:
        """True if it is a scheduler class."""
        return self.name not in _NAMES


def _refuse_path(name: str) -> None:
    module, kind = _parts(name)
    is_of_torch = module == _TORCH
    if is_of_torch and kind in _REFUSED:
        raise ValueError(f"schedule.name {name} cannot be used: {_REFUSED[kind]}.")
    if not re.fullmatch(_PATH, name) or (is_of_torch and kind not in ARGUMENTS):
        near = difflib.get_close_matches(kind, [*ARGUMENTS] if is_of_torch else _NAMES, n=1, cutoff=0.5)
        hint = f" Did you mean {f'{_TORCH}.' * is_of_torch}{near[0]}?" if near else ""
        raise ValueError(
            f"schedule.name {name!r} is not known.{hint} Use one of {', '.join(_NAMES)}, or the path of a scheduler, "
            f"for example {_TORCH}.CosineAnnealingWarmRestarts."
        )


def _refuse_arguments(name: str, args: object) -> None:
    module, kind = _parts(name)
    if module != _TORCH or not isinstance(args, dict):
        return
    required, others = ARGUMENTS[kind]
    has = ", ".join((*required, *others))
    for key in args:
        if key not in (*required, *others):
            near = difflib.get_close_matches(str(key), (*required, *others), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"schedule.args.{key} is not an argument of {name}.{hint} It has {has}.")
    for key in required:
        if key not in args:
            raise ValueError(f"schedule.args.{key} is required by {name}, whose arguments are {has}.")


def _parts(name: str) -> tuple[str, str]:
    """Module and class of a path."""
    module, _, kind = name.replace(":", ".").rpartition(".")
    return module, kind
