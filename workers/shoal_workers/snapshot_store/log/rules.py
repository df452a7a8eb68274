"""What an update does to the tensors of a part: the built-in AdamW, or an optimizer that a task declares pure and
elementwise. Hides how another process makes an equal optimizer.

    class       by its name, "module:Class"; every worker of a job can import the modules of its task
    settings    of each parameter group; JSON, exact for every number

A task's optimizer gets parameter groups from its constructor, and its defaults by name, as those of torch do
(docs/tasks.md).

The training step and the replay on the buddy call the same `update` for AdamW. It has the same operations in the same
order as torch.optim.AdamW (foreach, not capturable, not amsgrad), hence the same bits. A complex number is two real
ones, as it is there (`view_as_real`). Every operation works element by element, so the bits depend neither on the
memory that is read or written nor on the process. They may depend on the instruction set and on the number of threads:
`records.LogHead` has both. Called by `replay` and by the engine; reads no file.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal_workers.snapshot_store.log.records import Commit, LoggedOptimizer, LogHead

View = Callable[[str], Tensor]
"""The tensor of a part by its name. KeyError: the part has none."""


class Rule(Protocol):
    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters in the order of the log's head."""
        ...

    def apply(self, commit: Commit, gradients: Mapping[int, Tensor]) -> None:
        """Makes one update, in place. `gradients`: by number of the parameter. ValueError: the state gets tensors for
        which the part has no room."""
        ...


def rule_of(head: LogHead, view: View, names: Collection[str]) -> Rule:
    """`names`: of all tensors of the part. KeyError if one is missing; ValueError with another reason."""
    return _AdamW(head, view, names) if head.optimizer is None else _Declared(head, view, names)


def names_of(parameter: str) -> tuple[str, str, str]:
    """Names of a parameter and its moments in a part, with the built-in AdamW."""
    return f"model.{parameter}", f"optim.{parameter}.exp_avg", f"optim.{parameter}.exp_avg_sq"


def state_names(parameter: str, names: Collection[str]) -> dict[str, str]:
    """Returns, by key, the names of a parameter's optimizer state among `names`."""
    prefix = f"optim.{parameter}."
    keys = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {key: name for key, name in keys.items() if "." not in key}


class _AdamW:
    def __init__(self, head: LogHead, view: View, names: Collection[str]) -> None:
        self._head = head
        self._buffers = [
            ParameterBuffers(*(view(name) for name in names_of(parameter.name))) for parameter in head.parameters
        ]
        counters = (f"optim.{parameter.name}.step" for parameter in head.parameters)
        self._counters = [view(name) if name in names else None for name in counters]

    @property
    def parameters(self) -> Sequence[Tensor]:
        return [buffers.parameter for buffers in self._buffers]

    def apply(self, commit: Commit, gradients: Mapping[int, Tensor]) -> None:
        counts = commit.counts
        for index, group in enumerate(self._head.groups):
            numbers = [number for number in gradients if self._head.parameters[number].group == index]
            if numbers:
                settings = AdamWGroup(commit.lrs[index], group.beta1, group.beta2, group.eps, group.weight_decay)
                buffers = [self._buffers[number] for number in numbers]
                update(
                    settings,
                    [gradients[number] for number in numbers],
                    [float(counts[n]) for n in numbers],
                    buffers,
                    buffers,
                )
        for number in gradients:
            counter = self._counters[number]
            if counter is not None:
                counter.fill_(counts[number])


class _Declared:
    """An equal optimizer over the part's tensors."""

    def __init__(self, head: LogHead, view: View, names: Collection[str]) -> None:
        assert head.optimizer is not None
        self.parameters: list[nn.Parameter] = [
            nn.Parameter(view(f"model.{declared.name}")) for declared in head.parameters
        ]
        groups = [{**json.loads(text), "lr": 0.0, "params": []} for text in head.optimizer.groups]
        for declared, parameter in zip(head.parameters, self.parameters, strict=True):
            groups[declared.group]["params"].append(parameter)
        self._optimizer = rebuild(class_of(head.optimizer.path), groups, json.loads(head.optimizer.defaults))
        self._states: list[dict[str, Tensor]] = []
        for declared, parameter in zip(head.parameters, self.parameters, strict=True):
            state = {key: view(name) for key, name in state_names(declared.name, names).items()}
            for key, dtype in head.optimizer.counters:  # only the part of one rank has those
                state.setdefault(key, torch.zeros((), dtype=getattr(torch, dtype)))
            self._states.append(state)
            if state:
                self._optimizer.state[parameter] = dict(state)

    def apply(self, commit: Commit, gradients: Mapping[int, Tensor]) -> None:
        for group, lr in zip(self._optimizer.param_groups, commit.lrs, strict=True):
            group["lr"] = lr
        for key, values in commit.counters:
            for state, value in zip(self._states, values, strict=True):
                state[key].fill_(value)
        for number, parameter in enumerate(self.parameters):
            parameter.grad = gradients.get(number)
        self._optimizer.step()
        for parameter, state in zip(self.parameters, self._states, strict=True):
            made = self._optimizer.state.get(parameter, {})
            if made.keys() - state.keys():
                raise ValueError(f"the optimizer keeps {', '.join(made.keys() - state.keys())}, which the copy has not")
            if state:
                keep_tensors(self._optimizer.state[parameter], state)


def keep_tensors(state: dict[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Where an optimizer has put another tensor into its state, copies its values to the tensor that was there before,
    and puts that one back."""
    for key, tensor in tensors.items():
        kept = state.get(key)
        if isinstance(kept, Tensor) and kept is not tensor:
            tensor.copy_(kept)
            state[key] = tensor


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
    return [{**_settings(group), "lr": group["lr"]} for group in optimizer.param_groups]


def plain_settings_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings without the rate: what no step and no schedule may change."""
    return [_settings(group) for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS}


def _exact(settings: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a setting of the optimizer is not plain JSON: {error}") from None
    return text


_AT_ONCE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ParameterBuffers:
    """Memory for one parameter and its moments, each of the parameter's shape and type, without a gradient history."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def as_real(self) -> ParameterBuffers:
        """Views of the same memory."""
        return ParameterBuffers(_real(self.parameter), _real(self.exp_avg), _real(self.exp_avg_sq))


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """The settings of one parameter group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@torch.no_grad()
def update(
    group: AdamWGroup,
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[ParameterBuffers],
    targets: Sequence[ParameterBuffers],
) -> None:
    """Reads `sources` and writes `targets`, which may be the same.

    `counts`: per parameter, the number of its updates, this one included.
    """
    if any(gradient.is_complex() for gradient in gradients):
        sources, targets = [source.as_real() for source in sources], [target.as_real() for target in targets]
        gradients = [_real(gradient) for gradient in gradients]
    for batch in _batches(gradients):
        _update(group, gradients[batch], counts[batch], sources[batch], targets[batch])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _batches(gradients: Sequence[Tensor]) -> Iterator[slice]:
    """Parameters that are updated together: the temporaries of all at once would be as large as the gradients."""
    first = size = 0
    for index, gradient in enumerate(gradients):
        if size and size + gradient.nbytes > _AT_ONCE_BYTES:
            yield slice(first, index)
            first, size = index, 0
        size += gradient.nbytes
    yield slice(first, len(gradients))


def _update(
    group: AdamWGroup,
    gradients: list[Tensor],
    counts: Sequence[float],
    sources: Sequence[ParameterBuffers],
    targets: Sequence[ParameterBuffers],
) -> None:
    # These read the old memory and write the new; everything after them stays in the new.
    for gradient, old, new in zip(gradients, sources, targets, strict=True):
        if group.weight_decay != 0:
            torch.mul(old.parameter, 1 - group.lr * group.weight_decay, out=new.parameter)
        elif new is not old:
            new.parameter.copy_(old.parameter)
        torch.lerp(old.exp_avg, gradient, 1 - group.beta1, out=new.exp_avg)
        torch.mul(old.exp_avg_sq, group.beta2, out=new.exp_avg_sq)
    squares = [new.exp_avg_sq for new in targets]
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - group.beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - group.beta2**count) ** 0.5 for count in counts])
    torch._foreach_add_(roots, group.eps)
    torch._foreach_addcdiv_(
        [new.parameter for new in targets],
        [new.exp_avg for new in targets],
        roots,
        [(group.lr / (1 - group.beta1**count)) * -1 for count in counts],
    )
