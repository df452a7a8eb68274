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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shoal_workers.checkpoint.load_plan import Shape
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.engine.loop.sharded import Targets, split_dim
from shoal_workers.engine.step.update import changes, plain_settings, restored
from shoal_workers.engine.task.code_owner import is_file_of_task

_PLAIN = (bool, int, float, str, type(None))
_ATTRIBUTES = "__attributes__"
"""Beside the state of an optimizer of the program's own: those of its attributes that have changed."""
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
        self._built = {name: plain_settings(own_attributes(tracked)) for name, tracked in objects.items()}
        """Numbers and texts of own optimizers, as they were made."""
        self._mesh = mesh
        self._known: dict[str, tuple[Tensor, ...]] = {}
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
            changed = self._changed(name, tracked)
            state = {**tracked.state_dict(), _ATTRIBUTES: changed} if changed else tracked.state_dict()
            tree[name] = _flattened(state, name, own, self._mesh)
            self._known[name] = self._marked(own)
            tensors |= own
        return tensors, tree

    def mark(self, *, only_counted: bool = False) -> object:
        """Compares equal to a later mark if nothing that is tracked has changed in between. Takes microseconds for
        modules and optimizers: torch counts the changes of each tensor, and the settings of an optimizer are few.
        `only_counted`: of these alone. Other objects may return copies, which differ although nothing has changed."""
        marks: list[object] = []
        for name, tracked in self._objects.items():
            if isinstance(tracked, nn.Module):
                marks.append(_versions(self._tensors_of(name, tracked)))
            elif isinstance(tracked, Optimizer):
                settings = [
                    [value for key, value in group.items() if key != "params"] for group in tracked.param_groups
                ]
                changed = self._changed(name, tracked)
                marks.append((_versions(self._tensors_of(name, tracked)), repr(settings), repr(changed)))
            elif not only_counted:
                tensors: dict[str, Tensor] = {}
                tree = json.dumps(_flattened(tracked.state_dict(), name, tensors, self._mesh))
                marks.append((_versions(tensors.values()), [tensor.data_ptr() for tensor in tensors.values()], tree))
        return marks

    def _tensors_of(self, name: str, stateful: Stateful) -> tuple[Tensor, ...]:
        if name not in self._known:
            tensors: dict[str, Tensor] = {}
            _flattened(stateful.state_dict(), name, tensors, self._mesh)
            self._known[name] = self._marked(tensors)
        return self._known[name]

    def _marked(self, own: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
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
            for number, parameter in enumerate(
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
        }
        targets = Targets(live, dims, owners, self._mesh)
        return {path: targets.memory(path, shape) for path, shape in shapes.items()}

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
            state = _restored(tree[name], tensors)
            changed = state.pop(_ATTRIBUTES, {}) if isinstance(tracked, Optimizer) else {}
            tracked.load_state_dict(state)
            vars(tracked).update(restored(self._built[name], changed) if changed else {})

    def _changed(self, name: str, tracked: object) -> dict[str, list[Any]]:
        return changes(self._built[name], plain_settings(own_attributes(tracked)))


def own_attributes(tracked: object) -> dict[str, Any]:
    """Those that an optimizer of the program's own class has beside torch's, unless its own `state_dict` saves them."""
    if not isinstance(tracked, Optimizer) or type(tracked).state_dict is not Optimizer.state_dict:
        return {}
    is_own = is_file_of_task(sys.modules.get(type(tracked).__module__))
    return {key: value for key, value in vars(tracked).items() if is_own and key not in _OF_TORCH}


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [local_tensor(tensor)._version for tensor in tensors]


def _flattened(value: Any, path: str, tensors: dict[str, Tensor], mesh: DeviceMesh | None = None) -> Any:
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
        items = [(_key(key, path), _flattened(item, f"{path}/{key}", tensors, mesh)) for key, item in value.items()]
        return {"items": items}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_flattened(item, f"{path}/{i}", tensors, mesh) for i, item in enumerate(value)]}
    raise TypeError(
        f"run.track(): {path.replace('/', '.')} is {type(value).__name__}, and a state consists of tensors, numbers, "
        "texts, lists and dicts. Return one of these from state_dict(), or do not track the object."
    )


def _key(key: Any, path: str) -> Any:
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


def _restored(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    match node:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"value": value}:
            return value
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"items": items}:
            return {key: _restored(item, tensors) for key, item in cast(Sequence[tuple[Any, Any]], items)}
        case {"list": items}:
            return [_restored(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_restored(item, tensors) for item in items)
    raise ValueError(f"not a node of a tracked state: {node!r}")


def text_of_state(state: Mapping[str, Any]) -> str:
    """A state as one text, its tensors included: for small ones. TypeError as for `Tracked`."""
    tensors: dict[str, Tensor] = {}
    tree = _flattened(state, "state", tensors)
    contents = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _hex(tensor)]
        for name, tensor in tensors.items()
    }
    return json.dumps([tree, contents], allow_nan=False)


def state_of_text(text: str) -> Any:
    """The inverse of `text_of_state`."""
    tree, contents = json.loads(text)
    tensors = {
        name: torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
        if content
        else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape, content) in contents.items()
    }
    return _restored(tree, tensors)


def _hex(tensor: Tensor) -> str:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()
