"""Refuses state that no checkpoint holds: plain tensor attributes of modules that a forward pass reads and changes.

    self.average = 0.9 * self.average + 0.1 * x.mean()      reads what it replaces: state, refused
    self.count.add_(1)                                      written in place: state, refused
    self.last_attention = weights.detach()                  replaced without being read: for the task's own use
    self.calls += 1                                         a number: reads of it are not seen; named in the log

In the first passes of a generation, and only then: each attribute is replaced by a view of a tensor class that notices
reads. Not if the model is compiled. `StepBuffers` calls it around the forward passes of
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
from shoal_workers.torch_internals import is_compiled, without_torch_function

_WATCHED_PASSES = 3
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
            for one in args:
                if isinstance(one, _Watched):
                    one.__dict__["was_read"] = True
        with without_torch_function():
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Attribute:
    module: nn.Module
    name: str
    value: Tensor
    view: Tensor
    version: int
    before: Tensor | None
    """None if it is large."""


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
        attributes = list(_attributes_of(self._parts[part]))
        numbers = _numbers_of(self._parts[part])
        for one in attributes:
            vars(one.module)[one.name] = one.view
        try:
            yield
            changed = next((one for one in attributes if _is_changed(one)), None)
        finally:
            for one in attributes:
                # What the forward pass itself has put there stays.
                if vars(one.module).get(one.name) is one.view:
                    vars(one.module)[one.name] = one.value
        if changed is not None:
            with self._generation.user_code:
                raise ValueError(
                    f"the forward pass changes {self._name(part, changed.module, changed.name)}, a plain tensor "
                    "attribute that it also reads: no checkpoint holds it, and each worker would have its own. Make it "
                    f"a buffer: self.register_buffer({changed.name!r}, tensor)."
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

    def _name(self, part: int, module: nn.Module, attribute: str) -> str:
        prefix = next((name for name, one in self._parts[part].named_modules() if one is module), "")
        kind = next(one.__name__ for one in type(module).__mro__ if not issubclass(one, FSDPModule))
        return f"{f'{prefix}.{attribute}' if prefix else attribute!s} of {kind}"


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module is torch's or the engine's own: those keep no state in plain attributes."""
    return all(one.__module__.startswith(("torch.", "shoal_workers.")) for one in type(module).__mro__[:-1])


def _attributes_of(part: nn.Module) -> Iterator[_Attribute]:
    for module in part.modules():
        if _is_of_torch(module):
            continue
        for name, value in vars(module).items():
            if type(value) is Tensor and not value.requires_grad and value.layout is torch.strided:
                before = value.clone() if value.nbytes <= _COPIED_BYTES else None
                yield _Attribute(module, name, value, value.as_subclass(_Watched), value._version, before)


def _numbers_of(part: nn.Module) -> dict[tuple[int, str], tuple[nn.Module, object]]:
    return {
        (id(module), name): (module, value)
        for module in part.modules()
        if not _is_of_torch(module)
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def _is_changed(one: _Attribute) -> bool:
    """Whether an attribute is state: written in place, or read and replaced by other values."""
    now = vars(one.module).get(one.name)
    if one.value._version != one.version or (one.before is not None and not _equal(one.value, one.before)):
        return one.before is None or not _equal(one.value, one.before)
    was_read = vars(one.view).get("was_read", False)
    return isinstance(now, Tensor) and now is not one.view and was_read and not _equal(now, one.value)


def _equal(now: Tensor, before: Tensor) -> bool:
    """Whether shape, dtype, device and values are equal; nan equals nan."""
    if now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    with without_torch_function():
        return torch.equal(now, before) or bool(((now == before) | ((now != now) & (before != before))).all())
