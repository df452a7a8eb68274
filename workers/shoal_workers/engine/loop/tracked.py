"""The state of any objects that have `state_dict` and `load_state_dict`, as flat tensors and one tree of plain values.

    objects     model, optimizer, ema ...        what `run.track` was given, by name
    tensors     model/net.weight -> Tensor       what snapshots and checkpoints copy; a DTensor: this rank's part
    tree        the nested dicts and lists with a name in the place of each tensor; JSON

Pickles are refused: a state that is made of tensors, numbers and texts can be read by every later version of the code.
Called by `Run`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shoal_workers.checkpoint.load_plan import Shape
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.engine.loop.sharded import allocate, split_dim
from shoal_workers.engine.proof.attributes import has_no_state
from shoal_workers.engine.step.update import apply_changes, find_changes, select_plain_settings
from shoal_workers.engine.task.code_owner import is_file_of_task

_PLAIN = (bool, int, float, str, type(None))
_ATTRIBUTES = "__attributes__"
"""Beside the state of a module, and of an optimizer of the program's own: settings and attributes that have changed."""
_ORDER = "__order__"
"""Beside the state of an optimizer whose parameters are numbered in the order of the tracked modules."""
_OF_TORCH = frozenset({*vars(SGD([torch.zeros(1)])), "step", "_opt_called"})
"""Attributes of any optimizer of torch, and those that its schedulers add."""


class Stateful(Protocol):
    """What can be tracked."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Tracked:
    """Training thread only. Raises TypeError for a state that cannot be kept."""

    def __init__(self, objects: Mapping[str, Stateful], mesh: DeviceMesh | None = None) -> None:
        """`mesh`: that of the ranks, over which tensors may be split; None if no tensor may be."""
        for name, tracked in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(tracked, method, None)):
                    raise TypeError(
                        f"run.track({name}=...): {type(tracked).__name__} has no {method}(). Track objects that have "
                        "state_dict() and load_state_dict(), for example modules, optimizers and schedulers."
                    )
        self._objects = dict(objects)
        self._modes = {
            name: {path: part.training for path, part in module.named_modules()}
            for name, module in self.modules().items()
        }
        """For each module, which parts train while it is in the mode in which it was tracked: it may be evaluated when
        its state is collected."""
        self._built = {name: self._read_settings(name, tracked) for name, tracked in objects.items()}
        """Settings of modules, and numbers and texts of own optimizers, as they were made."""
        parameters = (parameter for module in self.modules().values() for parameter in module.parameters())
        self.order = {id(parameter): number for number, parameter in enumerate(parameters)}
        """Numbers of the parameters of all modules: the same in each process, which the order of an optimizer that was
        made of a set is not."""
        self._mesh = mesh
        self._last_collected: dict[str, tuple[Tensor, ...]] = {}
        """The tensors that each object had when it was collected last, without those that are `unmarked`."""
        self.unmarked: frozenset[str] = frozenset()
        """Names of tensors that `mark` leaves out: somebody else keeps their values."""

    def modules(self) -> dict[str, nn.Module]:
        return {name: tracked for name, tracked in self._objects.items() if isinstance(tracked, nn.Module)}

    def optimizers(self) -> dict[str, Optimizer]:
        return {name: tracked for name, tracked in self._objects.items() if isinstance(tracked, Optimizer)}

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The live tensors by name, and the tree. The tensors share the memory of the objects' own."""
        tensors: dict[str, Tensor] = {}
        tree: dict[str, Any] = {}
        for name, tracked in self._objects.items():
            own: dict[str, Tensor] = {}
            state = self.read_state(tracked)
            if changed := self._find_changed_settings(name, tracked):
                state = {**state, _ATTRIBUTES: changed}
            tree[name] = _flatten(state, name, own, self._mesh)
            self._last_collected[name] = self._select_marked(own)
            tensors |= own
        return tensors, tree

    def mark(self, *, only_counted: bool = False) -> object:
        """Compares equal to a later mark if nothing that is tracked has changed in between. Takes microseconds for
        modules and optimizers: torch counts the changes of each tensor, and the settings of an optimizer are few.
        `only_counted`: of these alone. Other objects may return copies, which differ although nothing has changed."""
        marks: list[object] = []
        for name, tracked in self._objects.items():
            if isinstance(tracked, nn.Module):
                marks.append(_read_versions(self._find_tensors(name, tracked)))
            elif isinstance(tracked, Optimizer):
                settings = [
                    [value for key, value in group.items() if key != "params"] for group in tracked.param_groups
                ]
                changed = self._find_changed_settings(name, tracked)
                marks.append((_read_versions(self._find_tensors(name, tracked)), repr(settings), repr(changed)))
            elif not only_counted:
                tensors: dict[str, Tensor] = {}
                tree = json.dumps(_flatten(tracked.state_dict(), name, tensors, self._mesh))
                marks.append(
                    (_read_versions(tensors.values()), [tensor.data_ptr() for tensor in tensors.values()], tree)
                )
        return marks

    def _find_tensors(self, name: str, stateful: Stateful) -> tuple[Tensor, ...]:
        if name not in self._last_collected:
            tensors: dict[str, Tensor] = {}
            _flatten(stateful.state_dict(), name, tensors, self._mesh)
            self._last_collected[name] = self._select_marked(tensors)
        return self._last_collected[name]

    def _select_marked(self, own: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensor for path, tensor in own.items() if path not in self.unmarked)

    def targets(self, shapes: Mapping[str, Shape], tree: Mapping[str, Any]) -> dict[str, Tensor]:
        """Memory for the tensors of a saved state, as `restore` takes them: whole, or this rank's parts."""
        live, _ = self.collect()
        dims: dict[str, int] = {}
        for node in tree.values():
            _note_dims(node, dims)
        owners = {
            f"{name}/state/{number}": parameter
            for name, optimizer in self.optimizers().items()
            for number, parameter in self._numbered(optimizer, is_in_order=_has_order(tree.get(name)))
        }
        return allocate(shapes, live, dims, owners, self._mesh)

    def restore(self, tensors: Mapping[str, Tensor], tree: Mapping[str, Any]) -> None:
        """Gives each object its state back.

        Raises:
            ValueError: the state is that of other objects.
        """
        if tree.keys() != self._objects.keys():
            raise ValueError(
                f"run.track() has {', '.join(sorted(self._objects))}, and the state to go on from has "
                f"{', '.join(sorted(tree)) or 'nothing'}. Track the same names as the run that it is of."
            )
        for name, tracked in self._objects.items():
            state = _unflatten(tree[name], tensors)
            changed = state.pop(_ATTRIBUTES, {}) if isinstance(tracked, (nn.Module, Optimizer)) else {}
            if isinstance(tracked, Optimizer) and state.pop(_ORDER, False):
                self._renumber(tracked, state)
            try:
                tracked.load_state_dict(state)
            except (KeyError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"run.track({name}=...): {type(tracked).__name__} does not take back its state: {error}. What a "
                    "loop adds to a module or an optimizer in a later step (modules, groups of parameters) has to be "
                    "there before run.track() if the function is called again: add it there if run.step says so."
                ) from error
            if changed:
                settings = apply_changes(self._built[name], changed)
                _set(tracked, {key: settings[key] for key in changed if key in settings})

    def _find_changed_settings(self, name: str, tracked: object) -> dict[str, list[Any]]:
        return find_changes(self._built[name], self._read_settings(name, tracked))

    def _read_settings(self, name: str, tracked: object) -> dict[str, Any]:
        """Return what a program may change beside the state: of a module the attributes of torch's own parts, such as
        the rate of a dropout, which parts train, and which parameters do; the attributes of an own optimizer."""
        if not isinstance(tracked, nn.Module):
            return select_plain_settings(find_own_attributes(tracked))
        if tracked.training == self._modes[name][""]:
            self._modes[name] = {path: part.training for path, part in tracked.named_modules()}
        settings: dict[str, Any] = {f"{path}.training": mode for path, mode in self._modes[name].items()}
        for path, part in tracked.named_modules():
            if has_no_state(part):
                attributes = {key: value for key, value in vars(part).items() if not key.startswith("_")}
                settings |= {f"{path}.{key}": value for key, value in attributes.items() if key != "training"}
        for path, parameter in tracked.named_parameters():
            settings[f"{path}.requires_grad"] = parameter.requires_grad
        return select_plain_settings(settings)

    def read_state(self, tracked: Stateful) -> Any:
        """Return the state of a tracked object, equal in all processes that have trained alike."""
        state = tracked.state_dict()
        return self._in_order(tracked, state) if isinstance(tracked, Optimizer) else state

    def _in_order(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state with the parameters of each group in the order of the modules; as it is if it has another
        form than torch's, or parameters that are in no tracked module."""
        groups = state.get("param_groups")
        is_known = all(id(parameter) in self.order for _, parameter in self._numbered(optimizer, is_in_order=False))
        own_numbers = [*range(sum(len(group["params"]) for group in optimizer.param_groups))]
        if not is_known or not groups or [n for group in groups for n in group.get("params", ())] != own_numbers:
            return state
        numbers = {id(parameter): number for number, parameter in self._numbered(optimizer, is_in_order=True)}
        new_numbers: dict[Any, int] = {}
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            new_numbers |= {old: numbers[id(p)] for old, p in zip(saved["params"], group["params"], strict=True)}
        by_number = {new_numbers.get(key, key): value for key, value in state.get("state", {}).items()}
        return {
            **state,
            "state": {key: by_number[key] for key in [*sorted(numbers.values()), *by_number] if key in by_number},
            "param_groups": [
                {**saved, "params": sorted(new_numbers[old] for old in saved["params"])} for saved in groups
            ],
            _ORDER: True,
        }

    def _renumber(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """The inverse of `_in_order`, for an optimizer that has the same parameters in any order: torch assigns the
        state by the positions in the groups."""
        numbers = {id(parameter): number for number, parameter in self._numbered(optimizer, is_in_order=True)}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            own = [numbers[id(parameter)] for parameter in group["params"]]
            if sorted(own) == saved["params"]:
                saved["params"] = own

    def _numbered(self, optimizer: Optimizer, *, is_in_order: bool) -> Iterator[tuple[int, Tensor]]:
        """The parameters with their numbers in a saved state."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        if is_in_order:
            groups = [sorted(group, key=lambda one: self.order.get(id(one), len(self.order))) for group in groups]
        return enumerate(parameter for group in groups for parameter in group)


def find_own_attributes(tracked: object) -> dict[str, Any]:
    """Those that an optimizer of the program's own class has beside torch's, unless its own `state_dict` saves them."""
    if not isinstance(tracked, Optimizer) or type(tracked).state_dict is not Optimizer.state_dict:
        return {}
    is_own = is_file_of_task(sys.modules.get(type(tracked).__module__))
    return {key: value for key, value in vars(tracked).items() if is_own and key not in _OF_TORCH}


def _set(tracked: object, settings: Mapping[str, Any]) -> None:
    """Give settings that `_read_settings` has returned."""
    if not isinstance(tracked, nn.Module):
        vars(tracked).update(settings)
        return
    owners: dict[str, Any] = {**dict(tracked.named_modules()), **dict(tracked.named_parameters())}
    for path, value in settings.items():
        owner, _, key = path.rpartition(".")
        if owner in owners:
            is_tuple = isinstance(getattr(owners[owner], key, None), tuple)
            setattr(owners[owner], key, tuple(value) if is_tuple else value)


def _has_order(node: Any) -> bool:
    return isinstance(node, Mapping) and any(key == _ORDER for key, _ in node.get("items", ()))


def _read_versions(tensors: Iterable[Tensor]) -> list[int]:
    return [local_tensor(tensor)._version for tensor in tensors]


def _flatten(value: Any, path: str, tensors: dict[str, Tensor], mesh: DeviceMesh | None = None) -> Any:
    if isinstance(value, DTensor):
        dim = split_dim(value, path.replace("/", "."), mesh)
        tensors[path] = value.detach()
        return {"tensor": path} if dim is None else {"tensor": path, "dim": dim}
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, _PLAIN):
        return {"value": value} if not isinstance(value, float) else {"float": value.hex()}
    if isinstance(value, Mapping):
        items = [(_check_key(key, path), _flatten(item, f"{path}/{key}", tensors, mesh)) for key, item in value.items()]
        return {"items": items}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_flatten(item, f"{path}/{i}", tensors, mesh) for i, item in enumerate(value)]}
    raise TypeError(
        f"run.track(): {path.replace('/', '.')} is {type(value).__name__}, and a state consists of tensors, numbers, "
        "texts, lists and dicts. Return one of these from state_dict(), or do not track the object."
    )


def _check_key(key: Any, path: str) -> Any:
    if not isinstance(key, _PLAIN):
        raise TypeError(f"run.track(): {path.replace('/', '.')} has the key {key!r}; keys are texts, numbers or None.")
    return key


def _note_dims(node: Any, dims: dict[str, int]) -> None:
    """Notes the dims along which the tensors of a tree are split."""
    match node:
        case {"tensor": str(name), "dim": int(dim)}:
            dims[name] = dim
        case {"items": items}:
            for _, item in items:
                _note_dims(item, dims)
        case {"list": items} | {"tuple": items}:
            for item in items:
                _note_dims(item, dims)


def _unflatten(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    match node:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"value": value}:
            return value
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"items": items}:
            return {key: _unflatten(item, tensors) for key, item in cast(Sequence[tuple[Any, Any]], items)}
        case {"list": items}:
            return [_unflatten(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_unflatten(item, tensors) for item in items)
    raise ValueError(f"not a node of a tracked state: {node!r}")


def encode_state(state: Mapping[str, Any]) -> str:
    """A state as one text, its tensors included: for small ones. TypeError as for `Tracked`."""
    tensors: dict[str, Tensor] = {}
    tree = _flatten(state, "state", tensors)
    contents = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _hex(tensor)]
        for name, tensor in tensors.items()
    }
    return json.dumps([tree, contents], allow_nan=False)


def decode_state(text: str) -> Any:
    """The inverse of `encode_state`."""
    tree, contents = json.loads(text)
    tensors = {
        name: torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
        if content
        else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape, content) in contents.items()
    }
    return _unflatten(tree, tensors)


def _hex(tensor: Tensor) -> str:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()
