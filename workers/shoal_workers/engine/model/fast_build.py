"""Builds a model without writing its parameters: their memory is only reserved, and no random values are drawn.

Every worker builds the whole model and keeps its part of it, so whatever a build writes, each worker holds whole for a
moment. Within a dispatch mode, large empty tensors get mappings of their own, which take no memory until they are
written, and fills of whole parameters are skipped. What they would have drawn is recorded, so that the part can be
drawn later (draw.py).

    for a restore, or other weights   the values do not matter: `build_for_restore`
    for a new model                   each parameter's last fill: `build_undrawn`

The device "meta" would do the same for plain models, but functions of torch.nn.init (trunc_normal_, orthogonal_) leave
such tensors alone without an error, and the values of other tensors may depend on parameters: a buffer that no
checkpoint holds, `self.scale = self.weight.norm().item()`, an array of NumPy. Here such a use is noticed, and the model
must be built in full. The same holds for other random values of the task's code (a random mask), which would come from
another position of the random stream. A restore lets parameters depend on parameters, since it overwrites them all.
Called by `build_runtime`, the engine and `warm_up`.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from shoal_workers.engine.model.draw import Constant, Distribution, Normal, Uniform
from shoal_workers.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    replace_truncated_normal,
    schema_of,
    storage_id,
    tree_leaves,
    truncated_normal,
)

_LARGE_BYTES = 64 << 10
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux: pages that are never written do not count as promised. Python names it from 3.13 on."""
_FILLS = frozenset({"aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_", "aten::bernoulli_"})
_CONSTANTS = frozenset({"aten::zero_", "aten::fill_"})
_VIEWS = frozenset({"aten::detach", "aten::alias"})
_READS = frozenset({"numpy", "tolist", "__array__", "__dlpack__"})
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})


def build_for_restore(build: Callable[[], nn.Module]) -> nn.Module:
    """`build()`, which must seed the random generators. Parameters hold arbitrary values, everything else is as usual.

    The model does not use the pages that the worker keeps: those are for the parts that are split off and written.
    """
    with _skipped_fills() as mode:
        model = build()
    return build() if mode.drew_elsewhere or mode.is_left_outside_parameters(model) else model


def build_undrawn(build: Callable[[], nn.Module]) -> tuple[nn.Module, Mapping[str, Distribution]] | None:
    """`build()`, and the distributions of the parameters that hold no values yet, by name.

    A tied parameter has its first name. None if the model must be built in full, because the values of a parameter are
    more than one distribution of all its elements, or because something else was drawn.
    """
    with _skipped_fills() as mode:
        model = build()
    if mode.drew_elsewhere or mode.used_undrawn or mode.is_left_outside_parameters(model):
        return None
    return model, {
        name: distribution
        for name, parameter in model.named_parameters()
        if (distribution := mode.distribution_of(parameter)) is not None
    }


@contextmanager
def _skipped_fills() -> Iterator[_SkipFills]:
    mode = _SkipFills()
    noticed = register_module_parameter_registration_hook(lambda _module, _name, parameter: mode.know(parameter))
    with noticed, mode, _NoticeReads(mode), _skipped_truncation(mode):
        yield mode


@contextmanager
def _skipped_truncation(mode: _SkipFills) -> Iterator[None]:
    """A vision transformer has its weights from `trunc_normal_`, which would look like a read of each. torch has no
    hook for it, so its inner function is replaced meanwhile; test_fast_build.py fails if a torch version has none."""
    original = truncated_normal()

    def skipped(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if mode.truncate(tensor) else original(tensor, *args, **kwargs)

    replace_truncated_normal(skipped)
    try:
        yield
    finally:
        replace_truncated_normal(original)


class _SkipFills(TorchDispatchMode):
    """Skips and records what would fill whole parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew_elsewhere = False
        """Random values were drawn for anything but a parameter."""
        self.used_undrawn = False
        """A parameter was read, or written in part, whose fill was skipped; or it has no such distribution."""
        self._reached_others = False
        """Something else than a parameter was computed from such a parameter."""
        self._parameters: dict[int, Tensor] = {}
        """Tensors by their memory. They are kept so that the memory is not used again."""
        self._filled: dict[int, Distribution | None] = {}
        """The tensors whose fill was skipped, by their memory. None if it is no distribution of all elements."""
        self._copies: dict[int, Tensor] = {}
        """Copies of parameters whose fill was skipped, by their memory: `copy.deepcopy` of a module makes parameters
        of them."""

    def know(self, parameter: nn.Parameter | None) -> None:
        """Notes a parameter that a module has: code may fill it through its `data`."""
        if parameter is not None and parameter.layout is torch.strided:
            self._parameters.setdefault(storage_id(parameter), parameter)

    def distribution_of(self, parameter: Tensor) -> Distribution | None:
        """Returns None if the tensor holds its values."""
        return self._filled.get(storage_id(parameter)) if parameter.layout is torch.strided else None

    def truncate(self, tensor: Tensor) -> bool:
        """`nn.init.trunc_normal_` of this tensor, which rejects values that it reads. False: it is no parameter."""
        if not isinstance(tensor, Tensor) or not self._is_parameter(tensor):
            return False
        self._fill(tensor, None)
        return True

    def note_read(self, values: Any) -> None:
        """Called when some code reads the elements of these tensors as numbers."""
        if self._has_undrawn(values):
            self.used_undrawn = self._reached_others = True

    def is_left_outside_parameters(self, model: nn.Module) -> bool:
        """Return whether something that the model has beside its parameters depends on values that were not drawn."""
        if self._reached_others:
            return True
        parameters = {storage_id(parameter) for parameter in model.parameters() if parameter.layout is torch.strided}
        # In a list of modules, or an attribute of the task. Four references are of this method and of `_parameters`.
        others = [
            parameter for memory, parameter in self._parameters.items() if memory in self._filled.keys() - parameters
        ]
        if any(sys.getrefcount(other) > 4 for other in others):
            return True
        own = [value for module in model.modules() for value in (*module._buffers.values(), *_attributes(module))]
        return bool(self._copies.keys() - parameters) or self._has_undrawn(own)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, schema_of(func).name
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name in _FILLS and self._is_parameter(args[0]):
                self._fill(args[0], _distribution(name, args, kwargs))
                return args[0]
            self.drew_elsewhere = True
        elif name in _CONSTANTS and self._is_skipped_constant(args):
            self._fill(args[0], Constant(float(args[1]) if len(args) > 1 else 0.0))
            return args[0]
        elif name not in _VIEWS and self._filled and self._has_undrawn((args, kwargs)):
            return self._used(func, args, kwargs)
        if func is torch.ops.aten.empty.memory_format and _is_large(args[0], **kwargs):
            return _separate_mapping(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        return func(*args, **kwargs)

    def _is_parameter(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter):
            self.know(tensor)
            return True
        return tensor.layout is torch.strided and storage_id(tensor) in self._parameters

    def _is_skipped_constant(self, args: Sequence[Any]) -> bool:
        """Small parameters without a skipped fill are written: code may read the weights of a norm."""
        tensor, value = args[0], args[1] if len(args) > 1 else 0.0
        if isinstance(value, Tensor) or not self._is_parameter(tensor):
            return False
        return storage_id(tensor) in self._filled or tensor.nbytes >= _LARGE_BYTES

    def _fill(self, tensor: Tensor, distribution: Distribution | None) -> None:
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if distribution is None or not is_whole or not tensor.is_floating_point():
            self.used_undrawn = True
            distribution = None
        self._filled[storage_id(tensor)] = distribution

    def _used(self, func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function with a parameter that was not drawn among its arguments."""
        self.used_undrawn = True
        result = func(*args, **kwargs)
        if schema_of(func).name == "aten::clone":
            self._copies[storage_id(result)] = result
        elif not self._stays_within(func, result, args, kwargs):
            self._reached_others = True
        return result

    def _stays_within(
        self, func: OpOverload[..., Any], result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Return whether it has written such parameters only, and returned nothing but views of them."""
        given = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)) | dict(kwargs)
        written = [given.get(argument.name) for argument in schema_of(func).arguments if argument.is_write]
        leaves = [leaf for leaf in tree_leaves((result, written)) if leaf is not None]
        return bool(leaves) and all(self._has_undrawn(leaf) for leaf in leaves)

    def _has_undrawn(self, values: Any) -> bool:
        return any(
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and ((memory := storage_id(leaf)) in self._filled or memory in self._copies)
            for leaf in tree_leaves(values)
        )


class _NoticeReads(TorchFunctionMode):
    """Notices what no dispatch mode sees: reads of a tensor's memory by Python and NumPy."""

    def __init__(self, mode: _SkipFills) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._mode.note_read(args)
        return func(*args, **(kwargs or {}))


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Values of plain attributes."""
    return (value for name, value in vars(module).items() if name not in _OF_TORCH)


def _distribution(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Distribution | None:
    """Returns None if it is none of those that can be drawn by element."""
    first, second = {"aten::normal_": ("mean", "std"), "aten::uniform_": ("from", "to")}.get(name, ("", ""))
    if not first or kwargs.get("generator") is not None:
        return None
    given = {**dict(zip(("self", first, second), args, strict=False)), **kwargs}
    low, high = float(given.get(first, 0.0)), float(given.get(second, 1.0))
    return Normal(low, high) if name == "aten::normal_" else Uniform(low, high)


def _is_large(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> bool:
    """Return whether this is an ordinary tensor on the CPU, of several pages."""
    is_plain = layout in (None, torch.strided) and memory_format in (None, torch.contiguous_format)
    dtype = dtype or torch.get_default_dtype()
    return is_plain and str(device or "cpu") == "cpu" and prod(size) * dtype.itemsize >= _LARGE_BYTES


def _separate_mapping(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written. The memory returns to the kernel with the tensor."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, prod(size) * dtype.itemsize, flags=flags), dtype=dtype).view(size)
