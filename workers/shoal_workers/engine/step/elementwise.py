"""Whether an optimizer updates every element on its own, so that it may run on local shards, and write its state
elsewhere than it reads it: known of torch's own classes and Shoal's, and found out by a trial for all others.

    the trial    an equal optimizer steps small random tensors of the parameters' dimensions and dtypes, with gradients
                 from 1e-4 to 1e3
    watched      every operation: only those that work element by element, or on single numbers; no random numbers, no
                 collective. One that does not is refused before it runs
    in pieces    the same tensors cut into pieces, each with an optimizer of its own: the same values, within rounding
                 (a vector's last elements are computed by other instructions)
    again        another equal optimizer that gets tensors and state goes on with the same bits: nothing else counts

What the trial cannot see is refused or rare: a class that treats only parameters of more than some 20,000 elements in
another way. A task decides itself with `elementwise_optimizer` (docs/tasks.md). An exception in the trial means no.
Apart from update.py, because it knows of no model and no sharding: it tries any optimizer.
Called by `build_update`.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from shoal_workers.engine.step import own_optimizers
from shoal_workers.engine.step.added_state import AddedState
from shoal_workers.engine.step.equal_optimizers import plain_settings_of_groups, rebuild, settings_of_groups
from shoal_workers.engine.step.own_optimizers import Lion
from shoal_workers.torch_internals import OpOverload, TorchDispatchMode, schema_of, tree_leaves

_ELEMENTWISE = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, NAdam, RAdam, RMSprop, Rprop})
_WHOLE = frozenset({Adafactor, LBFGS, Muon, SparseAdam, own_optimizers.Adafactor, own_optimizers.MuonAndAdamW})
_LONG_SIDES, _LONG_STEPS = (11, 6, 3, 2), 40
"""Longest sides of small tensors, and steps: some optimizers do something else in every tenth one."""
_SHORT_SIDES, _SHORT_STEPS = (160, 147, 5, 3), 4
"""Longest sides of larger tensors, and steps; these are cut into pieces, too, because some optimizers leave small
tensors alone."""
_SCALES = (1.0, 1e-4, 1e3, 0.1, 30.0)
_LEAST_SIDE = 5
_NO_ATTRIBUTES = frozenset(
    {"state", "param_groups", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"}
)
"""Compared as such, or torch's own notes of what it has checked."""
_PASSING = re.compile(
    "profiler::.*|aten::(alias|detach|(_unsafe_)?view|view_as_(real|complex)|real|imag|t|transpose|permute|(un)?squeeze"
    "|expand|copy_|_to_copy|lift_fresh|resolve_(conj|neg)|_conj|contiguous|fill_|zero_|(zeros|ones|empty|full)_like"
    "|new_(zeros|ones|empty|full)|is_same_size)"
)
"""Neither computes across elements; torch does not mark them pointwise."""
_ACROSS = frozenset({"aten::_foreach_norm", "aten::_foreach_max"})
_known: WeakKeyDictionary[type, dict[str, str]] = WeakKeyDictionary()
"""Results of trials in this process, since a group forms often. By class, because another one may get its id."""


def why_not_elementwise(optimizer: Optimizer) -> str:
    """Returns an empty text if the optimizer is elementwise and pure, else the reason, for people. Changes nothing; no
    collective; draws nothing."""
    if isinstance(optimizer, AddedState):  # what is added is elementwise
        return why_not_elementwise(optimizer.inner)
    kind = type(optimizer)
    if "step" in vars(optimizer) or any(
        getattr(optimizer, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    ):
        return f"something is hooked into the step of this {kind.__name__}"
    if kind in _ELEMENTWISE:
        return ""
    if kind in _WHOLE:
        return f"the optimizer {kind.__name__} is not elementwise"
    others = {name: value for name, value in vars(optimizer).items() if name not in _NO_ATTRIBUTES}
    known, key = _known.setdefault(kind, {}), f"{settings_of_groups(optimizer)} {others} {[*_kinds(optimizer)]}"
    if key not in known:
        known[key] = _try_out(optimizer)
    return known[key]


def is_held(optimizer: Optimizer) -> bool:
    """Return whether other code refers to its groups or its state."""
    if sys.getrefcount(optimizer.state) > 2 or sys.getrefcount(optimizer.param_groups) > 2:  # attribute, argument
        return True
    return any(sys.getrefcount(group) > 3 for group in optimizer.param_groups)  # and the variable of the loop


class _No(Exception):
    """The optimizer is not elementwise; the message continues "the optimizer X"."""


def _try_out(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    states = torch.get_rng_state(), random.getstate()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            _Trial(optimizer, _LONG_SIDES, _LONG_STEPS).run()
            _Trial(optimizer, _SHORT_SIDES, _SHORT_STEPS).run(in_pieces=True)
    except _No as reason:
        return f"the optimizer {name} is not elementwise: {reason}"
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}"
        return f"the optimizer {name} is not known to be elementwise: its trial ended with {message}"
    finally:
        # A trial may draw numbers (Python's own are not watched), and a worker that has a cached result runs none.
        torch.set_rng_state(states[0])
        random.setstate(states[1])
    return ""


class _Trial:
    """A trial of the optimizer on tensors whose sides are at most those given."""

    def __init__(self, optimizer: Optimizer, sides: Sequence[int], num_steps: int) -> None:
        self._original = optimizer
        self._num_steps = num_steps
        self._random = torch.Generator().manual_seed(1)
        self._tensors: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for group, shape, dtype in _kinds(optimizer):
            longest = itertools.chain(sides, itertools.repeat(sides[-1]))
            cut = [min(size, side) for size, side in zip(shape, longest, strict=False)]
            cut = [max(cut[0], _LEAST_SIDE), *cut[1:]]
            if len(cut) > 1 and cut[0] == cut[1]:  # else a matrix for the rows has the parameter's shape
                cut[1] -= 1
            self._tensors[group].append(self._draw(cut, dtype))
        self._gradients = [
            [[self._draw(tensor.shape, tensor.dtype) * scale for tensor in group] for group in self._tensors]
            for scale in itertools.islice(itertools.cycle(_SCALES), num_steps + 1)
        ]

    def run(self, *, in_pieces: bool = False) -> None:
        whole = self._make(self._tensors)
        _refuse_other_attributes(self._original, whole, "was given to its constructor and is not among its defaults")
        with _Watch():  # type: ignore[no-untyped-call]
            self._run_steps(whole, self._gradients[:-1])
        again = self._make([[own.clone() for own in group["params"]] for group in whole.param_groups])
        if repr(plain_settings_of_groups(again)) != repr(plain_settings_of_groups(whole)):
            raise _No("its step changes the settings of its groups")
        _refuse_other_attributes(whole, again, "changes with its steps and is not in its state")
        if in_pieces:
            self._compare_pieces(whole)
        for parameter, other in zip(_parameters(whole), _parameters(again), strict=True):
            again.state[other] = copy.deepcopy(dict(whole.state.get(parameter, {})))
        for optimizer in (whole, again):
            self._run_steps(optimizer, self._gradients[-1:])
        for first, other in zip(_parameters(whole), _parameters(again), strict=True):
            if not _are_same_bits(first, other):
                raise _No("its step depends on more than gradients, values, state and settings")

    def _make(self, tensors: Sequence[Sequence[Tensor]]) -> Optimizer:
        groups = [
            {**settings, "params": [nn.Parameter(tensor.clone()) for tensor in group]}
            for settings, group in zip(settings_of_groups(self._original), tensors, strict=True)
        ]
        return rebuild(type(self._original), groups, self._original.defaults)

    def _run_steps(self, optimizer: Optimizer, gradients: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        rates = [group["lr"] for group in settings_of_groups(self._original)]
        for number, step in enumerate(gradients, 1):
            for group, rate, group_step in zip(optimizer.param_groups, rates, step, strict=True):
                group["lr"] = rate * (number / len(gradients))
                for parameter, gradient in zip(group["params"], group_step, strict=True):
                    parameter.grad = gradient.clone()
            optimizer.step()
            self._refuse_state(optimizer)

    def _refuse_state(self, optimizer: Optimizer) -> None:
        parameter_ids = set(_parameters(optimizer))
        for parameter, state in optimizer.state.items():
            if parameter not in parameter_ids:
                raise _No("it has a state that belongs to no parameter")
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape != parameter.shape and value.numel() != 1:
                    raise _No(f"its state {key!r} has another shape than the parameter")

    def _compare_pieces(self, whole: Optimizer) -> None:
        for piece in _PIECES:
            cut = self._make([[piece(tensor) for tensor in group] for group in self._tensors])
            self._run_steps(
                cut, [[[piece(tensor) for tensor in group] for group in step] for step in self._gradients[:-1]]
            )
            for parameter, parameter_whole in zip(_parameters(whole), _parameters(cut), strict=True):
                state, other = whole.state.get(parameter, {}), cut.state.get(parameter_whole, {})
                if not parameter_whole.numel():
                    continue
                if state.keys() != other.keys():
                    raise _No("it has another state for a piece of a parameter")
                pairs = [(parameter, parameter_whole), *((value, other[key]) for key, value in state.items())]
                for value, measured in pairs:
                    expected = piece(value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
                    if not _is_close(expected, measured):
                        raise _No("a piece of a parameter gets other values than in the whole one")

    def _draw(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(tuple(shape), dtype=wide, generator=self._random).to(dtype)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises _No before an operation runs that could let elements depend on others, or on something else."""

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, schema_of(func).name
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _No(f"it draws random numbers ({name})")
        if not self._is_harmless(func, name, (args, kwargs)):
            raise _No(f"it uses {name.removeprefix('aten::')} on whole tensors")
        return func(*args, **kwargs)

    def _is_harmless(self, func: OpOverload[..., Any], name: str, given: Any) -> bool:
        if torch.Tag.pointwise in func.tags or _PASSING.fullmatch(name):
            return True
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            return name not in _ACROSS
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        return name.startswith("aten::") and all(tensor.numel() == 1 for tensor in tensors)


def _kinds(optimizer: Optimizer) -> Iterator[tuple[int, tuple[int, ...], torch.dtype]]:
    """Number of a group, and the largest shape of each number of dimensions and each dtype in it."""
    for index, group in enumerate(optimizer.param_groups):
        largest: dict[tuple[int, torch.dtype], torch.Size] = {}
        for parameter in group["params"]:
            kind = parameter.ndim, parameter.dtype
            if parameter.requires_grad and parameter.numel() > largest.get(kind, torch.Size([0])).numel():
                largest[kind] = parameter.shape
        for (ndim, dtype), shape in largest.items():
            if ndim:
                yield index, tuple(shape), dtype


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_other_attributes(optimizer: Optimizer, other: Optimizer, what: str) -> None:
    """Raises _No if attributes differ that are neither state nor settings, or cannot be compared."""
    values, others = vars(optimizer), vars(other)
    for name in values.keys() | others.keys():
        if name in _NO_ATTRIBUTES:
            continue
        if name not in values or name not in others or not _is_same(values[name], others[name]):
            raise _No(f"its attribute {name!r} {what}")


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _are_same_bits(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def _are_same_bits(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and torch.equal(tensor.nan_to_num(), other.nan_to_num())
    )


def _is_close(value: object, other: object) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return _is_same(value, other)
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    tolerance = 1e-3 if value.dtype in (torch.float32, torch.complex64) else 0.05 if value.itemsize == 2 else 1e-6
    return torch.allclose(value, other, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)


_PIECES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor[:3],
    lambda tensor: tensor[3:],
    lambda tensor: tensor[:0],
    lambda tensor: tensor[:, : max(1, tensor.shape[1] // 2)] if tensor.ndim > 1 else tensor[1:4],
)
"""The first and the last rows, none, and the first columns."""
