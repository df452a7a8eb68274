"""Which optimizers a spec can name, the keys and arguments that each of them has, and the groups of its parameters.

    a name      adamw, sgd, lion ...: `NAMED`. Some have keys of their own, and all but adamw take `args`
    a path      torch.optim.RAdam, package.module.Class: a class, made with `args`

A spec is checked without torch, which the control plane does not import, so the arguments of torch's classes stand here
in a table; a test compares it with torch. Those of a class that is not torch's are checked where it is imported. In no
document are keys that its optimizer does not have, so the spec of an AdamW is that of earlier releases. Pure. The
engine makes the optimizer: engine/step/named_optimizer.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.config import JsonDict

from shoal_workers.contract.base import Frozen, if_set, whole
from shoal_workers.contract.rules import Rule, Section

ADAMW = "adamw"
MUON = "muon"
EMA = "weights_ema"
"""Key of the average of a parameter in its optimizer state, and in the names of checkpoints."""
OUTER, OUTER_MOMENTUM, SENT, RESIDUAL = "outer", "outer_momentum", "outer_sent", "outer_residual"
"""The same for what an island keeps of a parameter: the outer weight, its momentum, the own weight at the end of the
last round, and what compression has left out."""
ADDED_STATE = (EMA, OUTER, OUTER_MOMENTUM, SENT, RESIDUAL)
"""Keys of what stands beside an optimizer's own state: a checkpoint may lack it."""


@dataclass(frozen=True, slots=True)
class Named:
    """An optimizer that the spec knows."""

    path: str
    """The path of its class."""
    args: tuple[str, ...] = ()
    """What `optimizer.args` may have; without the rate, the weight decay and the keys, which the spec has itself."""
    keys: tuple[str, ...] = ()
    """The keys of the spec that not every optimizer reads."""
    weight_decay: float | None = 0.0
    """Where the spec has none; None if it has no weight decay at all."""
    is_elementwise: bool = True
    """It updates each element on its own, and so runs on shards."""


_IN_TORCH = {
    "ASGD": ("lambd", "alpha", "t0", "foreach", "maximize"),
    "Adadelta": ("rho", "eps", "foreach", "maximize"),
    "Adagrad": ("lr_decay", "initial_accumulator_value", "eps", "foreach", "maximize"),
    "Adam": ("betas", "eps", "amsgrad", "decoupled_weight_decay", "foreach", "maximize"),
    "AdamW": ("betas", "eps", "amsgrad", "foreach", "maximize"),
    "Adamax": ("betas", "eps", "foreach", "maximize"),
    "NAdam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay", "foreach", "maximize"),
    "RAdam": ("betas", "eps", "decoupled_weight_decay", "foreach", "maximize"),
    "RMSprop": ("alpha", "eps", "momentum", "centered", "foreach", "maximize"),
    "Rprop": ("etas", "step_sizes", "foreach", "maximize"),
    "SGD": ("momentum", "dampening", "nesterov", "foreach", "maximize"),
}
_TORCH = {
    f"torch.optim.{name}": Named(
        f"torch.optim.{name}", args, weight_decay={"Rprop": None, "AdamW": 0.01}.get(name, 0.0)
    )
    for name, args in _IN_TORCH.items()
}
_OWN = "shoal_workers.engine.step.own_optimizers"
_BETAS = ("beta1", "beta2", "eps")
NAMED: Mapping[str, Named] = {
    ADAMW: Named("torch.optim.AdamW", keys=(*_BETAS, "fused"), weight_decay=0.1),
    "adam": Named("torch.optim.Adam", ("amsgrad", "decoupled_weight_decay", "maximize"), keys=_BETAS),
    "sgd": _TORCH["torch.optim.SGD"],
    "lion": Named(f"{_OWN}.Lion", ("betas",), weight_decay=0.1),
    MUON: Named(
        f"{_OWN}.MuonAndAdamW",
        ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
        keys=_BETAS,
        weight_decay=0.1,
        is_elementwise=False,
    ),
    "adafactor": Named(f"{_OWN}.Adafactor", ("beta2_decay", "eps", "d", "maximize"), is_elementwise=False),
    "adagrad": _TORCH["torch.optim.Adagrad"],
    "rmsprop": _TORCH["torch.optim.RMSprop"],
}
"""What `optimizer.name` can be, beside a path."""
_REFUSED = {
    "torch.optim.LBFGS": "it computes the loss several times in each step, and Shoal computes it once",
    "torch.optim.SparseAdam": "it takes sparse gradients only, and Shoal's are dense",
    "torch.optim.Muon": "it takes matrices only; optimizer.name: muon has AdamW for all other parameters",
    "torch.optim.Adafactor": "it does not run on sharded parameters; optimizer.name: adafactor does",
}
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*[.:][A-Za-z_][A-Za-z0-9_]*")
_PATH_OF_TORCH = rf"torch\.optim[.:]({'|'.join(_IN_TORCH)})"
_NAME = whole("|".join((*NAMED, _PATH_OF_TORCH, rf"(?!torch\.optim[.:]\w+$){_PATH.pattern}")))
_ONLY_SOME_READ = (*_BETAS, "fused")


def find_named_optimizer(name: str) -> Named | None:
    """Return the optimizer of this name; None for any other class, whose arguments are checked where it is imported."""
    return NAMED.get(name) or _TORCH.get(name.replace(":", "."))


def _rules() -> JsonDict:
    """Rules for the JSON Schema: which keys and arguments the optimizer of each name has. Those of a path are not in
    it: a rule for each class of torch would be most of the schema."""
    return {"allOf": [*(_rule(name, rule) for name, rule in NAMED.items()), _OF_PATH, _MUON_ALONE]}


def _rule(name: str, optimizer_rule: Named) -> JsonDict:
    absent: JsonDict = {key: False for key in _ONLY_SOME_READ if key not in optimizer_rule.keys}
    args: JsonDict = {"properties": dict.fromkeys(optimizer_rule.args, True), "additionalProperties": False}
    condition: JsonDict = {"properties": {"name": {"const": name}}}
    if name != ADAMW:  # without the key it is adamw
        condition["required"] = ["name"]
    return {"if": condition, "then": {"properties": {**absent, "args": args}}}


_OF_PATH: JsonDict = {
    "if": {"required": ["name"], "properties": {"name": {"not": {"enum": [*NAMED]}}}},
    "then": {"properties": dict.fromkeys(_ONLY_SOME_READ, False)},
}
_MUON_ALONE: JsonDict = {
    "if": {"required": ["name"], "properties": {"name": {"const": MUON}}},
    "else": {"properties": {"groups": {"items": {"properties": {"muon": {"type": "null"}}}}}},
}


def _not_read(name: str) -> tuple[str, ...]:
    optimizer = find_named_optimizer(name)
    keys = optimizer.keys if optimizer is not None else ()
    return tuple(key for key in _ONLY_SOME_READ if key not in keys) + (("args",) if name == ADAMW else ())


_SETTINGS = ("lr", "lr_factor", "weight_decay", "muon")
_RULES_OF_GROUP: JsonDict = {
    "allOf": [
        if_set("lr", {"properties": {"lr_factor": {"type": "null"}}}),
        {
            "if": {"required": ["frozen"], "properties": {"frozen": {"const": True}}},
            "then": {"properties": {key: {"type": "null"} for key in _SETTINGS}},
            "else": {
                "anyOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in _SETTINGS]
            },
        },
    ]
}


class OptimizerGroup(Section):
    """Parameters with settings of their own; what is not set here is as for all others."""

    model_config = ConfigDict(json_schema_extra=_RULES_OF_GROUP)

    match: str = Field(min_length=1, max_length=255)
    """Names of parameters, as `model.named_parameters()` has them; `*` stands for any characters, also dots:
    "embed.*", "*.bias". A parameter belongs to the first group that matches."""
    lr: float | None = Field(None, gt=0, le=1e3, allow_inf_nan=False)
    """Peak learning rate."""
    lr_factor: float | None = Field(None, gt=0, le=1e6, allow_inf_nan=False)
    """Peak learning rate as a multiple of `optimizer.lr`, also after that has changed. Not with `lr`."""
    weight_decay: float | None = Field(None, ge=0, le=1e3)
    """Applied to all parameters of the group, whatever their number of dimensions."""
    frozen: bool = False
    """Not trained: without gradient and without optimizer state."""
    muon: bool | None = None
    """With the optimizer muon: whether it updates the group's matrices, or AdamW; null: all but embeddings."""

    rules = (
        Rule(
            lambda group: group.frozen and group.settings,
            lambda group: (
                f"the group {group.match!r} is frozen, so it has no {' and no '.join(group.settings)}. "
                f"Remove {'it' if len(group.settings) == 1 else 'them'}, or frozen."
            ),
        ),
        Rule(
            lambda group: group.lr is not None and group.lr_factor is not None,
            lambda group: f"the group {group.match!r} has lr and lr_factor. Set one of them.",
        ),
        Rule(
            lambda group: not group.frozen and not group.settings,
            lambda group: (
                f"the group {group.match!r} sets nothing. Give it lr, lr_factor, weight_decay or frozen: true."
            ),
        ),
    )

    @property
    def settings(self) -> list[str]:
        """The settings that the group has of its own."""
        return [key for key in _SETTINGS if getattr(self, key) is not None]


class OptimizerSpec(Frozen):
    """The optimizer. A task that defines `build_optimizer` overrides it."""

    model_config = ConfigDict(json_schema_extra=_rules())

    name: str = Field(ADAMW, max_length=255, json_schema_extra={"pattern": _NAME})
    """adamw (Loshchilov & Hutter 2019), adam, sgd, lion (Chen et al. 2023), muon (Jordan et al. 2024; AdamW for all but
    matrices), adafactor (Shazeer & Stern 2018), adagrad, rmsprop; or the path of a class, for example
    torch.optim.RAdam."""
    lr: float = Field(3e-4, gt=0, le=1e3, allow_inf_nan=False)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """adamw, adam, muon (its AdamW): decay of the mean of the gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """adamw, adam, muon (its AdamW): decay of the mean of the squared gradients."""
    eps: float = Field(1e-8, gt=0, le=1)
    """adamw, adam, muon (its AdamW): added to the square root of the mean squared gradient, so that the update never
    divides by 0."""
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    """Applied only to parameters with two or more dimensions. Where it is not set, it is 0.1 for adamw, lion and muon,
    that of torch for an optimizer of torch, and 0 for another class."""
    clip_norm: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    """Gradients with a larger global L2 norm are scaled down to this norm; null: never."""
    fused: bool | Literal["auto"] = "auto"
    """adamw: one kernel for the whole update; "auto": only if the parameters are on a GPU. The fused kernel rounds
    differently from the plain update, so with `deterministic: true` it is refused, and "auto" means false."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay, for example 0.999: validated and exported in
    place of the weights, and part of checkpoints. null: none."""
    args: dict[str, Any] = Field(default_factory=dict, max_length=32)
    """Further arguments of the optimizer, by the names that its class has: {momentum: 0.9, nesterov: true}. adamw has
    none."""
    groups: tuple[OptimizerGroup, ...] = Field((), max_length=64)
    """Parameters with settings of their own, each group with `match` and lr or lr_factor, weight_decay, or frozen:
    [{match: "embed.*", lr_factor: 0.1}, {match: "*.bias", weight_decay: 0}, {match: "encoder.*", frozen: true}]. The
    first group that matches counts; a pattern that no parameter matches is an error."""

    @model_validator(mode="before")
    @classmethod
    def _is_of_its_name(cls, document: Any) -> Any:
        """The keys, which the optimizer has, and the weight decay, which depends on it."""
        name = document.get("name", ADAMW) if isinstance(document, dict) else None
        if not isinstance(name, str) or len(name) > 255:
            return document
        _refuse_name(name)
        optimizer = find_named_optimizer(name)
        for key in document:
            if optimizer is not None and key not in cls.model_fields and key in optimizer.args:
                raise ValueError(
                    f"optimizer.{key} is an argument of {name}. Arguments are in optimizer.args, for example "
                    f'optimizer: {{"name": "{name}", "args": {{"{key}": ...}}}}.'
                )
            if key in _not_read(name) and (key != "args" or document[key]):
                raise ValueError(f"optimizer.{key} is not a setting of {name}. {_describe_settings(name, optimizer)}")
        given = document.get("args")
        for key in given if isinstance(given, dict) and optimizer is not None else ():
            if optimizer is not None and key not in optimizer.args:
                raise ValueError(_describe_unknown_argument(name, str(key), optimizer))
        decay = 0.0 if optimizer is None else optimizer.weight_decay
        if decay is None and document.get("weight_decay"):
            raise ValueError(
                f"optimizer.weight_decay is not a setting of {name}. {_describe_settings(name, optimizer)}"
            )
        groups = document.get("groups")
        # What a validator of this kind returns is no longer JSON for pydantic, and lists are refused.
        lists = {"groups": tuple(groups)} if isinstance(groups, list) else {}
        return {"weight_decay": decay or 0.0} | document | lists

    @model_validator(mode="after")
    def _has_groups_of_its_name(self) -> OptimizerSpec:
        for number, group in enumerate(self.groups):
            if group.muon is not None and self.name != MUON:
                raise ValueError(
                    f"optimizer.groups.{number}.muon is set, and optimizer.name is {self.name}. Remove it, or set "
                    "optimizer.name to muon."
                )
            if group.weight_decay and (optimizer := find_named_optimizer(self.name)) and optimizer.weight_decay is None:
                raise ValueError(f"optimizer.groups.{number}.weight_decay: {self.name} has no weight decay. Remove it.")
        return self

    @model_serializer(mode="wrap")
    def _without_what_it_does_not_read(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        document = handler(self)
        for key in _not_read(self.name):
            document.pop(key, None)
        for key in ("args", "groups", "ema_decay"):
            if not document.get(key):
                document.pop(key, None)
        return document

    @property
    def is_elementwise(self) -> bool:
        """True if it is known to update each element on its own."""
        optimizer = find_named_optimizer(self.name)
        return optimizer is not None and optimizer.is_elementwise

    @property
    def is_plain_adamw(self) -> bool:
        """True if all parameters have the built-in AdamW, in its two groups."""
        return self.is_built_in and not self.groups

    @property
    def is_built_in(self) -> bool:
        """True if it is the AdamW that writes to other memory than it reads."""
        return self.name == ADAMW and self.ema_decay is None


def _refuse_name(name: str) -> None:
    dotted = name.replace(":", ".")
    if message := _REFUSED.get(dotted):
        raise ValueError(f"optimizer.name {name} cannot be used: {message}.")
    if find_named_optimizer(name) is None and (not _PATH.fullmatch(name) or re.fullmatch(r"torch\.optim\.\w+", dotted)):
        near = difflib.get_close_matches(name.lower().rpartition(".")[2], [*NAMED], n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"optimizer.name {name!r} is not known.{hint} Use one of {', '.join(NAMED)}, or the path of a class, for "
            "example torch.optim.RAdam."
        )


def _describe_settings(name: str, optimizer: Named | None) -> str:
    if optimizer is None:
        return f"Those of a class are in optimizer.args; {name} also gets optimizer.lr and optimizer.weight_decay."
    decay = () if optimizer.weight_decay is None else ("weight_decay",)
    text = f"It has {', '.join(('lr', *decay, 'clip_norm', 'ema_decay', 'groups', *optimizer.keys))}"
    return text + (f", and in optimizer.args: {', '.join(optimizer.args)}." if optimizer.args else ".")


def _describe_unknown_argument(name: str, key: str, optimizer: Named) -> str:
    near = difflib.get_close_matches(key, optimizer.args, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"optimizer.args.{key} is not an argument of {name}.{hint} {_describe_settings(name, optimizer)}"


def find_group(groups: Sequence[OptimizerGroup], name: str) -> int | None:
    """Return the number of the first group to which a parameter of this name belongs; None if there is none."""
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group.match)), None)


def describe_unmatched(groups: Sequence[OptimizerGroup], names: Sequence[str]) -> str:
    """Return a sentence about the first group without a parameter; empty if there is none. `names`: all parameters."""
    owners = {find_group(groups, name) for name in names}
    for number, group in enumerate(groups):
        if number in owners:
            continue
        if taken := [name for name in names if fnmatchcase(name, group.match)]:
            return (
                f"optimizer.groups.{number}.match {group.match!r}: every parameter that it matches ({_some(taken)}) "
                "belongs to a group before it. The first group that matches counts: move this one up."
            )
        plain = group.match.replace("*", "")
        near = difflib.get_close_matches(plain, names, n=3, cutoff=0.3) or list(names[:3])
        return (
            f"optimizer.groups.{number}.match {group.match!r} matches no parameter of the model. The nearest names are "
            f"{_some(near)}; `*` stands for any characters."
        )
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
