"""An optimizer over a sharded model, and the name of each of its parameters. Hides on which tensors it runs, how its
state comes into being, and which of its settings are state.

The default optimizer works element by element, so it runs on the local shards: plain tensors that share their memory
with the model's DTensors. That avoids DTensor's dispatch in every step, and the 0.3 s that filling its caches takes in
the first step after each re-forming. A task's own optimizer, and another one that the spec names, get the DTensors,
because they may need operations on whole tensors; one that is known or promised to be elementwise (elementwise.py) runs
on the local shards, too. Where parameters are whole, any of them runs on these.

Settings of parameter groups:

    built by the code and spec of now   betas, weight decay, momentum ... : these act, whatever the source was made with
    changed by the run that was saved   a counter in the group, a setting that the task's code has changed while it
                                        trained: these are state, and are restored, unless it is built otherwise now

A source therefore has, for each group, only what differs from what was built, with the value that was built. Rates and
implementations (`foreach`, `fused`) are always those of now: a rate is a function of the step.

The groups are those of the whole model in every layout, see parameter_groups.py. Called by `build_runtime`, and by
whatever steps, saves or restores the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from shoal_workers.contract.optimizers import ADDED_STATE, EMA, OptimizerSpec
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.cutting import WholeNumbers, local, shard_like, take_attributes
from shoal_workers.engine.step import own_optimizers
from shoal_workers.engine.step.added_state import AddedState
from shoal_workers.engine.step.averaged_weights import Averaging
from shoal_workers.engine.step.elementwise import why_as_built
from shoal_workers.engine.step.named_optimizer import named_optimizer
from shoal_workers.engine.step.parameter_groups import (
    NoParameters,
    ParameterGroup,
    default_groups,
    parameters_in,
    regroup,
)
from shoal_workers.engine.task.reachable import marks, reachable
from shoal_workers.engine.task.task import LoadedTask


class Update:
    """Steps the optimizer, and gives its state names and global shapes. Training thread only."""

    def __init__(
        self,
        assembly: Assembly,
        optimizer: Optimizer,
        local_parameters: Sequence[tuple[nn.Parameter, nn.Parameter]],
        *,
        why_copies: str = "",
        is_built_in: bool = False,
    ) -> None:
        """
        Args:
            local_parameters: the optimizer's parameters, each with the model parameter that shares its memory, which is
                the same one if it is whole.
            why_copies: why its state must stay where it is, so that snapshots are copies; empty: it may be moved.
            is_built_in: `default_update` has made it.
        """
        self.optimizer = optimizer
        self._inner = optimizer.inner if isinstance(optimizer, AddedState) else optimizer
        """Without what is added to its state."""
        self.why_copies = why_copies
        self._is_built_in = is_built_in
        self._local_parameters = local_parameters
        named: dict[int, tuple[str, Tensor]] = {
            id(parameter): (name, parameter) for name, parameter in assembly.named_parameters()
        }
        self._owners = named | {
            id(local_parameter): named[id(parameter)]
            for local_parameter, parameter in local_parameters
            if id(parameter) in named
        }
        self._own = {id(parameter): local_parameter for local_parameter, parameter in local_parameters}
        self._by_own = {id(local_parameter): parameter for local_parameter, parameter in local_parameters}
        self._tied_copies = list(assembly.tied_copies())
        for group in optimizer.param_groups:  # the schedule scales each group's own peak rate
            group["initial_lr"] = group["lr"]
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._built = [select_plain_settings(group) for group in optimizer.param_groups]
        self._built_attributes = select_plain_settings(self._attributes)
        self._modules = [module for part in assembly.parts for module in part.modules()]
        self._num_steps = 0
        """In this generation."""
        self._stateful = {name for name, _, _, state in self._named_states() if state}
        """Names of the parameters whose state the optimizer's constructor makes, as Adagrad's does. It makes none
        later."""

    def step(self, lr_factor: float) -> None:
        """One update with the gradients of the model's parameters, which are dropped afterwards."""
        self._refuse_other_rates()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        with torch.no_grad():
            for local_parameter, parameter in self._local_parameters:
                gradient = parameter.grad
                local_parameter.grad = None if gradient is None else local(gradient)
        self._step_watched()
        self._rates = [group["lr"] for group in self.optimizer.param_groups]  # step() may divide by a counter
        self.optimizer.zero_grad(set_to_none=True)
        for _, parameter in self._local_parameters:
            parameter.grad = None
        for _, owner in self._owners.values():  # also of those that the optimizer does not have: they would add up
            owner.grad = None

    def changed_settings(self) -> list[dict[str, list[Any]]]:
        """Return, by parameter group, the settings that have changed since the optimizer was built (`find_changes`)."""
        groups = self.optimizer.param_groups
        return [
            find_changes(built, select_plain_settings(group)) for built, group in zip(self._built, groups, strict=False)
        ]

    @property
    def _attributes(self) -> dict[str, Any]:
        """Those of an optimizer that is neither torch's nor Shoal's: a counter beside its state is state, too."""
        is_known = type(self._inner).__module__.startswith(("torch.optim", "shoal_workers."))
        return {} if is_known else vars(self._inner)

    @property
    def keeps_tensors(self) -> bool:
        """True if it may have copied parameters when it was made, and no checkpoint holds the copies."""
        return any(isinstance(value, Tensor) and value.numel() > 1 for _, value in self._unsaved())

    def _unsaved(self) -> Iterator[tuple[str, object]]:
        """Yields all that the optimizer, or what is hooked into its steps, keeps and no checkpoint holds."""
        optimizer = self._inner
        roots = {
            name: value
            for name, value in vars(optimizer).items()
            if (name in self._attributes and name not in (*_SAVED, *select_plain_settings(self._attributes)))
            or (name in _HOOKS and value)
        }
        if not roots and not self._attributes:
            return
        roots["state"] = [
            value
            for parameter, state in optimizer.state.items()
            for value in (state.values() if id(parameter) in self._owners else [state])
            if not isinstance(value, (Tensor, *_PLAIN))
        ]
        saved = [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *self._modules, optimizer]
        for group in optimizer.param_groups:
            roots |= {key: value for key, value in group.items() if key != "params" and not is_plain(value)}
        yield from reachable(roots, {*self._owners, *map(id, saved)})

    def _step_watched(self) -> None:
        is_watched = self._num_steps < _WATCHED_STEPS or self._num_steps % _WATCHED_STEPS == 0
        before, generator = marks(self._unsaved()) if is_watched else {}, torch.default_generator.get_state()
        is_split = any(isinstance(value, DTensor) for group in self.optimizer.param_groups for value in group["params"])
        with WholeNumbers() if is_split else nullcontext():  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self._num_steps += 1
        if is_watched:
            self._refuse_changed(before, marks(self._unsaved()))
        if is_split and not torch.equal(generator, torch.default_generator.get_state()):
            raise ValueError(
                f"step() of {type(self.optimizer).__name__} draws random numbers, and the parameters are sharded: they "
                "would depend on the number of workers. Set parallelism: {shard: none}, with which each worker has "
                "whole parameters."
            )

    def _refuse_changed(self, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        kind, place = type(self.optimizer).__name__, "build_optimizer()"
        changed = [path for path in {**before, **now} if before.get(path) != now.get(path)]
        if changed:
            raise ValueError(
                f"step() of {kind}, or what is hooked into it, changes {changed[0]!r}, which no checkpoint holds. Keep "
                "tensors in self.state[parameter], and numbers as attributes of the optimizer."
            )
        if len(self.optimizer.param_groups) != len(self._built):
            raise ValueError(
                f"{kind} has {len(self.optimizer.param_groups)} parameter groups, and {len(self._built)} when it was "
                f"made: no checkpoint holds the new ones. Return all of them from {place}."
            )

    def _refuse_other_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            if group["lr"] != rate:
                raise ValueError(
                    f"the task has changed the rate of a group of {type(self.optimizer).__name__} from {rate:g} to "
                    f"{group['lr']:g}, and each step sets it by the schedule of the spec. Set schedule in the spec, or "
                    "change the rate in step()."
                )

    def changed_attributes(self) -> dict[str, list[Any]]:
        """Return the numbers and texts of the optimizer itself that have changed since it was built."""
        return find_changes(self._built_attributes, select_plain_settings(self._attributes))

    def restore_attributes(self, changed: Mapping[str, Sequence[Any]]) -> None:
        _set_plain(self._attributes, apply_changes(self._built_attributes, changed))

    def restore_settings(self, changed: Sequence[Mapping[str, Sequence[Any]]]) -> str:
        """Called after a restore from a run that had these `changed_settings`. Returns what cannot be restored, for
        people."""
        if len(changed) != len(self._built):
            self._set_settings(self._built)
            lost = ", ".join(sorted({name for group in changed for name in group}))
            numbers = f"{len(changed)} parameter groups before, {len(self._built)} now"
            return f"the optimizer has {numbers}: what the run itself had changed in them ({lost}) is lost" * bool(lost)
        self._set_settings(
            [
                apply_changes(built, changed_settings)
                for built, changed_settings in zip(self._built, changed, strict=True)
            ]
        )
        return ""

    def _set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=False):
            _set_plain(group, values)

    def named_parameters(self) -> Iterator[tuple[int, str, nn.Parameter, Tensor]]:
        """Number of the group, name, the optimizer's parameter and the model's; without tied copies."""
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter_of_group in group["params"]:
                if id(parameter_of_group) in self._owners:
                    yield (
                        index,
                        self._owners[id(parameter_of_group)][0],
                        parameter_of_group,
                        self._by_own.get(id(parameter_of_group), parameter_of_group),
                    )

    def averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters of the model, tied copies too, each with the average of this rank's part of it, if it has one."""
        if not isinstance(self.optimizer, Averaging):
            return
        for local_parameter, state in self.optimizer.state.items():
            if isinstance(average := state.get(EMA), Tensor):
                yield self._by_own.get(id(local_parameter), local_parameter), local(average)

    def local_parameter(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The optimizer's parameter that shares its memory with a parameter of the model."""
        return self._own.get(id(parameter))

    def materialise_state(self) -> None:
        """Make the optimizer create the state of every parameter that has none, so that a checkpoint can be read into
        it.

        Runs one step with zero gradients at rate zero, in which the other parameters have no gradient. It counts as a
        step, and an unusual optimizer may change parameters in it, so call it only right before a restore that
        overwrites everything, and drops the state that the source does not have (`drop_state`).
        """
        lacking = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and not self.optimizer.state.get(parameter)
        ]
        if not lacking:
            return
        if self._is_built_in:
            self._materialise_adamw(set(lacking))
            return
        settings = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.zero_grad(set_to_none=True)  # an update that was broken off leaves gradients behind
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in lacking:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, before in zip(self.optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(before)  # not only the rate: some optimizers count their steps there

    def _materialise_adamw(self, lacking: Collection[nn.Parameter]) -> None:
        """Only creates the tensors of the optimizer's first step, with arbitrary values: a step would touch every page
        three times."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in lacking:
                    continue
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.empty_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.empty_like(parameter, memory_format=torch.preserve_format),
                }

    def drop_state(self, absent: Collection[str]) -> None:
        """Drops the optimizer state of the parameters that these tensors of the state belong to: they are as before
        their first gradient. Where only what is added to it is absent, the next update makes that."""
        keys: dict[str, set[str]] = defaultdict(set)
        for full_name in absent:
            name, _, key = full_name.removeprefix("optim.").rpartition(".")
            keys[name if full_name.startswith("optim.") else ""].add(key)
        for name, _, parameter, _ in self._named_states():
            own = keys.get(name)
            if own is not None and own <= {*ADDED_STATE}:
                for key in own:
                    self.optimizer.state[parameter].pop(key, None)
            elif own is not None:
                state = self.optimizer.state.pop(parameter)
                if added := {key: state[key] for key in ADDED_STATE if key in state and key not in own}:
                    self.optimizer.state[parameter] = added

    @property
    def _may_grow(self) -> bool:
        """True if it may make more state in a later update than in its first: those of torch and Shoal do not."""
        return not type(self._inner).__module__.startswith(("torch.optim", own_optimizers.__name__))

    def make_state(self, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Make a tensor of a parameter's state, of zeros, that the source of a restore has. False: there is none to
        make."""
        if not self._may_grow:
            return False
        for owner_name, owner, parameter, state in self._named_states():
            if owner_name == name and key not in state:
                whole = shape == tuple(owner.shape)
                state[key] = torch.zeros_like(parameter, dtype=dtype) if whole else torch.zeros(shape, dtype=dtype)
                return True
        return False

    def may_lack_state(self, name: str) -> bool:
        """Return whether a parameter can be without optimizer state; else a source must have its state."""
        return name not in self._stateful

    def _named_states(self) -> list[tuple[str, Tensor, Tensor, dict[str, Any]]]:
        """Return name, parameter of the model, parameter of the optimizer, and its state. Without tied copies, which
        have the same values under the same name."""
        states = self.optimizer.state.items()
        return [(*self._owners[id(key)], key, state) for key, state in states if id(key) in self._owners]

    def state(self) -> Iterator[tuple[str, str, object]]:
        """(parameter's name, key, value) of all of the optimizer's state; shards as DTensors of global shape."""
        for name, owner, parameter, state in self._named_states():
            for key, value in state.items():
                # Counters such as AdamW's `step` have another shape than their parameter, and are equal on all ranks.
                is_shard = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_shard and isinstance(owner, DTensor) and parameter is not owner:
                    value = shard_like(owner, value)
                yield name, key, value

    def plain_values(self) -> dict[str, object]:
        """The values of the optimizer's state that are not tensors, by `<name>.<key>`."""
        return {
            f"{name}.{key}": value
            for name, _, _, state in self._named_states()
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }

    def restore_plain_values(self, plain_values: dict[str, object]) -> None:
        """Set the values that are not tensors, by `<name>.<key>`; missing ones keep their value. A state without a
        tensor is dropped if none of its values is given."""
        for name, _, parameter, state in self._named_states():
            if not any(isinstance(value, Tensor) or f"{name}.{key}" in plain_values for key, value in state.items()):
                del self.optimizer.state[parameter]
                continue
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    state[key] = plain_values.get(f"{name}.{key}", value)
        if self._may_grow:
            states = {name: state for name, _, _, state in self._named_states()}
            for full_name, value in plain_values.items():
                name, _, key = full_name.rpartition(".")
                if name in states:
                    states[name].setdefault(key, value)

    @torch.no_grad()
    def fill_tied_copies(self) -> None:
        """Copies, after a restore, the value and the optimizer state of each parameter to its tied copies."""
        for parameter, tied_copy in self._tied_copies:
            first, second = self._own.get(id(parameter), parameter), self._own.get(id(tied_copy), tied_copy)
            pairs: list[tuple[Tensor, Tensor]] = [(first, second)]
            state = self.optimizer.state.get(first)
            if not state:
                self.optimizer.state.pop(second, None)
            copied = self.optimizer.state.get(second, {})
            for key, value in (state or {}).items():
                if isinstance(value, Tensor):
                    pairs.append((value, copied[key]))
                else:
                    copied[key] = value
            for source, target in pairs:
                target.copy_(source)


def build_update(
    task: LoadedTask, assembly: Assembly, spec: JobSpec, groups: list[ParameterGroup] | None = None
) -> Update:
    """The task's own optimizer over the model's parameters, or the one that the spec names. `groups`: of the whole
    model; None means those of the plain AdamW, or of a task's optimizer that sees all parameters itself."""
    if not task.has_optimizer and spec.optimizer.is_built_in and spec.islands is None:
        return default_update(assembly, spec.optimizer, groups, deterministic=spec.deterministic)
    if groups is not None and not any(parameter.requires_grad for parameter in assembly.parameters()):
        return Update(assembly, NoParameters(groups), ())
    optimizer, declared = task.build_optimizer(assembly.module, spec.optimizer), task.elementwise_optimizer
    if optimizer is None:
        assert groups is not None, "those of a spec are always made"
        optimizer, declared = named_optimizer(assembly, spec.optimizer, groups, spec.islands), None
    else:
        if groups is not None:
            regroup(optimizer, groups, assembly)
        _refuse_strangers(optimizer, assembly)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_split = any(isinstance(parameter, DTensor) for parameter in parameters)
    why_copies = ""
    if declared is False:
        why_copies = "the task says elementwise_optimizer = False"
    elif not all(parameter.is_cpu for parameter in parameters):
        why_copies = "the optimizer has parameters that are not on a CPU"
    elif declared is None:
        why_copies = why_as_built(optimizer, is_split=is_split)
    if why_copies:
        return Update(assembly, optimizer, (), why_copies=why_copies)
    update = Update(assembly, optimizer, _put_on_shards(optimizer))
    if declared is None and not is_split and update.keeps_tensors:
        update.why_copies = f"the optimizer {type(optimizer).__name__} keeps tensors beside its state"
    return update


def _refuse_strangers(optimizer: Optimizer, assembly: Assembly) -> None:
    """Raises ValueError if the optimizer has a parameter that the model does not have."""
    known = set(map(id, assembly.parameters()))
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if id(parameter) not in known:
            raise ValueError(
                f"build_optimizer() returned an optimizer with a parameter of shape {list(parameter.shape)} that "
                "model.parameters() does not have: no worker would get the gradients of others, and no checkpoint "
                "holds it. Make it an attribute of a module of the model (self.weight = nn.Parameter(...)), and "
                "several an nn.ParameterList or nn.ModuleList."
            )


@torch.no_grad()
def _put_on_shards(optimizer: Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give an optimizer this rank's local shards in place of DTensors, in its groups and its state. Returns each of its
    parameters with that of the model."""
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            own = parameter
            if isinstance(parameter, DTensor):
                own = nn.Parameter(local(parameter), requires_grad=parameter.requires_grad)
                group["params"][number] = take_attributes(own, parameter)
            state = optimizer.state.pop(parameter, None)  # made by a constructor, as Adagrad's does
            if state is not None:
                optimizer.state[own] = {
                    key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()
                }
            pairs.append((own, parameter))
    return pairs


def default_update(
    assembly: Assembly,
    settings: OptimizerSpec,
    groups: list[ParameterGroup] | None = None,
    *,
    deterministic: bool = False,
) -> Update:
    """AdamW on the local shards of a sharded model, or on whole parameters. `groups`: None: those of a spec without
    groups."""
    if groups is None:
        groups = default_groups(assembly.named_parameters(), settings)
    trained = [(name, parameter) for name, parameter in assembly.all_parameters() if parameter.requires_grad]
    optimizer = adamw(parameters_in(groups, trained), settings, deterministic=deterministic)
    why_copies = "optimizer.fused is true" if optimizer.defaults["fused"] else ""
    if not all(local(parameter).is_cpu for _, parameter in trained):
        why_copies = "the state is on a GPU"
    return Update(assembly, optimizer, _put_on_shards(optimizer), why_copies=why_copies, is_built_in=True)


_TOGETHER_BYTES = 32 << 20
"""The parameters of a larger model are updated one after the other on a CPU: the temporaries of all at once would be as
large as the gradients."""


def adamw(groups: Sequence[dict[str, Any]], settings: OptimizerSpec, *, deterministic: bool = False) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019).

    Args:
        groups: each with its parameters, rate and weight decay.
        deterministic: never fused.
    """
    parameters = [local(parameter) for group in groups for parameter in group["params"]]
    betas = (settings.beta1, settings.beta2)
    fused = settings.fused
    if fused == "auto":
        # The bits of fused updates differ from those of foreach updates.
        fused = not deterministic and all(parameter.is_cuda for parameter in parameters)
    is_together = any(p.is_cuda for p in parameters) or sum(p.nbytes for p in parameters) <= _TOGETHER_BYTES
    return AdamW(
        list(groups),  # all, also without parameters: each stage of a pipeline has the same, perhaps all frozen
        lr=settings.lr,
        betas=betas,
        eps=settings.eps,
        foreach=is_together and not fused,
        fused=fused,
    )


def _set_plain(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key in select_plain_settings(target).keys() - values.keys():
        del target[key]  # a later step had added it
    for key, value in values.items():
        # JSON has made lists of tuples such as `betas`.
        kind = type(target.get(key)) if isinstance(value, list) else None
        target[key] = value if kind is None else tuple(value) if kind is tuple else list(value)


_WATCHED_STEPS = 16
"""The first steps of a generation, in which it is compared what an optimizer keeps; later it is in every 16th."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "step")
_SAVED = ("state", "param_groups", "defaults")
_NOT_SAVED = ("params", "param_names", "lr", "foreach", "fused")
_PLAIN = (bool, int, float, str, type(None))

Group = Mapping[str, Any]
Change = Sequence[Any]
"""[built, now], or [now] if nothing was built under this name."""


def select_plain_settings(group: Group) -> dict[str, Any]:
    """Returns the settings that can be saved, as they would be read from JSON."""
    plain = {key: value for key, value in group.items() if key not in _NOT_SAVED and is_plain(value)}
    return {key: list(value) if isinstance(value, list | tuple) else value for key, value in plain.items()}


def find_changes(built: Group, now: Group) -> dict[str, list[Any]]:
    """What a run has changed in a group; both as `select_plain_settings` returns them."""
    return {
        key: [built[key], value] if key in built else [value]
        for key, value in now.items()
        if key not in built or built[key] != value
    }


def apply_changes(built: Group, changed: Mapping[str, Change]) -> dict[str, Any]:
    """The plain settings of a group that is built as `built` says now, after a run that had made these changes."""
    kept = {}
    for key, (*before, now) in changed.items():
        if before == ([built[key]] if key in built else []):
            kept[key] = now
    return {**built, **kept}


def is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value)
    )
