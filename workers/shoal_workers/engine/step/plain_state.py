"""Refuses state that no checkpoint holds: plain tensors of modules and of the task that `loss` reads and changes.

    self.average = 0.9 * self.average + 0.1 * x.mean()      reads what it replaces: state, refused
    self.count.add_(1)                                      written in place: state, refused
    self.hidden = self.cell(x, self.hidden)                 a tuple, list or dict of tensors: likewise
    self.queue.append(x.detach())                           a list that was read, too: state, refused
    self.masks[length] = mask                               a new key of a dict: a cache, left alone
    self.last_attention = weights.detach()                  replaced without being read: for the task's own use
    self.calls += 1                                         a number: reads of it are not seen; named in the log

In the first passes of a generation, and only then: each tensor is replaced by a view of a tensor class that notices
reads, in lists and dicts in place. Not if the model is compiled. `StepBuffers` calls it around the forward passes of
training; apart from it, because nothing here is ever summed or restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.task_state import has_declared_state
from shoal_workers.torch_internals import is_compiled, tree_leaves, without_torch_function

_WATCHED_PASSES = 3
_MAX_DEPTH = 3
"""Depth of containers in containers that is looked at."""
_MAX_ITEMS = 100
"""Longer containers are data."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_COPIED_BYTES = 64 << 10
_NOT_READS = frozenset(
    {
        *("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size"),
        *("data_ptr", "__len__", "__repr__", "__hash__", "to", "cpu", "cuda", "ndimension", "nelement", "get_device"),
        *("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad", "is_sparse", "names"),
        *("is_meta", "is_leaf", "grad_fn", "nbytes", "itemsize", "is_quantized", "_version", "type"),
    }
)
"""Reads of these tell nothing about the values."""


class _Watched(Tensor):
    """A view of an attribute. Results are plain tensors."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name not in _NOT_READS:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, _Watched):
                    one.__dict__["was_read"] = True
        with without_torch_function():
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of an attribute, and the view that takes its place."""

    value: Tensor
    view: Tensor
    version: int
    before: Tensor | None
    """None if it is large."""

    @property
    def was_read(self) -> bool:
        return bool(vars(self.view).get("was_read", False))

    @property
    def is_written(self) -> bool:
        """Whether it was changed in place."""
        is_known = self.value._version == self.version and (self.before is None or _equal(self.value, self.before))
        return not is_known and (self.before is None or not _equal(self.value, self.before))


@dataclass(frozen=True, slots=True)
class _Attribute:
    """An attribute that is a tensor, or a tuple, list or dict with tensors."""

    owner: object
    name: str
    value: Any
    shown: Any
    """What the attribute is while it is watched."""
    tensors: tuple[_Tensor, ...]
    leaves: Mapping[_Path, Any]
    """What the attribute had before, by its place in the containers."""

    @classmethod
    def watch(cls, owner: object, name: str, value: Any) -> _Attribute:
        leaves = dict(_leaves(value))
        tensors = {
            id(leaf): _Tensor(
                leaf,
                leaf.as_subclass(_Watched),
                leaf._version,
                leaf.clone() if leaf.nbytes <= _COPIED_BYTES else None,
            )
            for leaf in leaves.values()
            if is_plain(leaf)
        }
        shown = _exchanged(value, {number: tensor.view for number, tensor in tensors.items()})
        vars(owner)[name] = shown
        return cls(owner, name, value, shown, tuple(tensors.values()), leaves)

    def end(self, originals: Mapping[int, Tensor]) -> bool:
        """Puts the tensors back. `originals`: of all views, by id. Returns whether the attribute is state: written in
        place, or read and replaced by other values."""
        now = vars(self.owner).get(self.name)
        restored = self.value if now is self.shown and not isinstance(now, (list, dict)) else _exchanged(now, originals)
        if now is not None:
            vars(self.owner)[self.name] = restored
        if any(tensor.is_written for tensor in self.tensors):
            return True
        leaves = dict(_leaves(restored))
        is_replaced = any(
            not _is_same(leaves.get(path), value) for path, value in self.leaves.items() if is_plain(value)
        )
        has_grown = isinstance(restored, list) and len(leaves) != len(self.leaves)
        return (is_replaced or has_grown) and any(tensor.was_read for tensor in self.tensors)


class PlainState:
    """Watches one rank's part of the model in one generation. Training thread only."""

    def __init__(self, generation: Generation, assembly: Assembly) -> None:
        self._generation = generation
        self._parts = assembly.parts
        self._num_passes = 0
        self._remarked: set[str] = set()
        modules = [module for part in assembly.parts for module in part.modules()]
        self.is_compiled = generation.spec.compile or any(is_compiled(module) for module in modules)

    def begin(self) -> None:
        """Called before the first micro-batch of a pass."""
        self._num_passes += 1

    @contextmanager
    def watched(self, part: int) -> Iterator[None]:
        """Surrounds the forward pass of a micro-batch. Raises ValueError for state that no checkpoint holds."""
        if self._num_passes > _WATCHED_PASSES or self.is_compiled:
            yield
            return
        modules = [module for module in self._parts[part].modules() if not has_no_state(module)]
        numbers = _numbers_of(modules)
        owners: list[object] = [*modules]
        if not has_no_state(task := self._generation.task.instance) and not has_declared_state(task):
            owners.append(task)
        attributes = [
            _Attribute.watch(owner, name, value)
            for owner in owners
            for name, value in list(vars(owner).items())
            if name not in MODULE_ATTRIBUTES and _may_be_state(value)
        ]
        changed: list[_Attribute] = []
        try:
            yield
        finally:
            originals = {id(tensor.view): tensor.value for one in attributes for tensor in one.tensors}
            changed += [attribute for attribute in attributes if attribute.end(originals)]
        if changed:
            owner, name = changed[0].owner, changed[0].name
            kind = "attribute" if isinstance(changed[0].value, Tensor) else f"{type(changed[0].value).__name__}"
            with self._generation.user_code:
                raise ValueError(
                    f"the forward pass changes {self._name(part, owner, name)}, a plain tensor {kind} that it also "
                    "reads: no checkpoint holds it, and each worker would have its own. Make it a buffer of a module: "
                    f"self.register_buffer({name!r}, tensor)."
                )
        self._remark(part, numbers)

    def _remark(self, part: int, numbers: dict[tuple[int, str], tuple[nn.Module, object]]) -> None:
        """Name numbers that change, once each."""
        if self._generation.rank != 0:
            return
        changed = [
            self._name(part, module, name)
            for (_, name), (module, value) in numbers.items()
            if vars(module).get(name) != value
        ]
        fresh = [name for name in changed if name not in self._remarked]
        if fresh:
            self._remarked.update(fresh)
            self._generation.outbox.log_text(
                f"the forward pass changes {', '.join(fresh[:5])}: no checkpoint holds plain attributes, and each "
                "worker counts its own micro-batches. If results depend on it, make it a buffer (register_buffer)."
            )

    def _name(self, part: int, owner: object, attribute: str) -> str:
        prefix = next((name for name, module in self._parts[part].named_modules() if module is owner), "")
        kind = next(one.__name__ for one in type(owner).__mro__ if not issubclass(one, FSDPModule))
        return f"{f'{prefix}.{attribute}' if prefix else attribute!s} of {kind}"


def has_no_state(owner: object) -> bool:
    """True if its class is torch's or the engine's: those keep no state in plain attributes."""
    return not hasattr(owner, "__dict__") or all(
        kind.__module__.startswith(("torch.", "shoal_workers.")) for kind in type(owner).__mro__[:-1]
    )


def _numbers_of(modules: Sequence[nn.Module]) -> dict[tuple[int, str], tuple[nn.Module, object]]:
    return {
        (id(module), name): (module, value)
        for module in modules
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


_Path = tuple[Any, ...]


def is_plain(value: object) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.layout is torch.strided


def _may_be_state(value: object) -> bool:
    return any(is_plain(leaf) for _, leaf in _leaves(value))


def _is_container(value: Any, depth: int) -> bool:
    return type(value) in (tuple, list, dict) and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH


def _leaves(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if not _is_container(value, len(path)):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, (*path, key))


def _exchanged(value: Any, tensors: Mapping[int, Tensor], depth: int = 0) -> Any:
    """Returns the value with other tensors in the place of those; lists and dicts are changed in place."""
    if not _is_container(value, depth):
        return tensors.get(id(value), value)
    if isinstance(value, tuple):
        return tuple(_exchanged(item, tensors, depth + 1) for item in value)
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        value[key] = _exchanged(item, tensors, depth + 1)
    return value


def _is_same(now: object, before: Tensor) -> bool:
    return now is before or (isinstance(now, Tensor) and _equal(now, before))


def _equal(now: Tensor, before: Tensor) -> bool:
    """Whether shape, dtype, device and values are equal; nan equals nan."""
    if now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    with without_torch_function():
        return torch.equal(now, before) or bool(((now == before) | ((now != now) & (before != before))).all())
