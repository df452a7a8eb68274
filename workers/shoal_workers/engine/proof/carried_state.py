"""State that no checkpoint holds, found by what it does: rank 0 computes a micro-batch twice, before the first step.

    first       loss, metrics, gradients and buffers, with a copy of the model
    again       the same micro-batch, parameters, buffers and random numbers: what differs was carried over
    set back    the attributes of the task and of modules of its own classes are those of before. If the results are the
                first ones again, the attributes that had changed carry it, whatever they are

Such an attribute is refused with its name. A number that only feeds a log changes no result. Where setting it back does
not help (a closure, a file, the time), the log says so, once. What `state_dict` of the task returns is declared, and
not compared. The trained model, the task's attributes and the random numbers are left as they were. The result is
remembered as that of a proof. Called by `TaskProgram` on all ranks.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.proof.before_training import find_text, keep_text
from shoal_workers.engine.proof.prove import Shrunk, Whole, copy_of, proof_context, run_whole, shrunk
from shoal_workers.engine.state.restore import is_restoring
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.plain_state import MODULE_ATTRIBUTES, has_no_state, is_plain
from shoal_workers.engine.step.task_state import has_declared_state
from shoal_workers.engine.task.randomness import generator_states, set_generator_states

_REMEMBERED = "carried state"
_MAX_ITEMS = 10_000
"""Longer containers are data."""
_MAX_NAMES = 5
_SAME = 1e-6
"""Relative difference that is rounding: the same operations on the same numbers differ on a GPU only."""
_WAYS_OUT = (
    "Two ways out: a buffer of a module (self.register_buffer(name, tensor)), or state_dict() and load_state_dict() of "
    "the task, whose content is saved, restored and equal on all workers."
)


def refuse_carried_state(generation: Generation, group: Group) -> None:
    """All ranks. Raises TaskFailed on each of them if the results of the task depend on what it has computed before."""
    if is_restoring(generation.assignment) or has_no_state(generation.task.instance):
        return
    text = ""
    if generation.rank == 0:
        known = find_text(generation.spec, _REMEMBERED)
        text = _find(generation) if known is None else known
        keep_text(generation.spec, _REMEMBERED, text)
        gc.collect()
    kind, _, text = group.decide(_REMEMBERED, text, lambda texts: texts[0]).partition("\n")
    if kind == "remark" and generation.rank == 0:
        generation.outbox.log_text(text)
    if kind == "refused":
        with generation.user_code:
            raise ValueError(text)


def _find(generation: Generation) -> str:
    """Empty, or the kind of the finding and a sentence. What the task raises is left to the training."""
    task, states = generation.task, generator_states()
    attributes = _Attributes({"the task": task.instance})
    try:
        with generation.user_code:
            smaller = shrunk(task.build_model, generation.plan, fully_sharded(1))
            return _Trial(proof_context(generation, smaller), smaller).run()
    except Exception:  # also TooLarge
        return ""
    finally:
        attributes.set_back()
        set_generator_states(states)


class _Trial:
    def __init__(self, generation: Generation, smaller: Shrunk | None) -> None:
        self._generation = generation
        task = generation.task
        self._batches = Batches(task, task.train_data, generation.device)
        self._model = copy_of(task.build_model, generation.spec.seed, generation.device, smaller)
        self._parameters = {name: value.detach().clone() for name, value in self._model.named_parameters()}
        self._buffers = {name: value.clone() for name, value in self._model.named_buffers()}

    def run(self) -> str:
        owners: dict[str, object] = {"the task": self._generation.task.instance}
        own = {name: module for name, module in self._model.named_modules() if not has_no_state(module)}
        owners |= {f"{name or 'the model'}": module for name, module in own.items()}
        attributes = _Attributes(owners)
        task: Any = self._generation.task.instance
        declared = copy.deepcopy(task.state_dict()) if has_declared_state(task) else None
        first = self._compute()
        if declared is not None:  # it is part of the state
            task.load_state_dict(declared)
        changed = attributes.changed()
        again = self._compute()
        if _is_same(first, again):
            return ""
        attributes.set_back()
        if not changed or not _is_same(first, self._compute()):
            return (
                "remark\nthe loss or a gradient of a micro-batch is another one when it is computed a second time, and "
                "it is not known why: a variable outside of objects, a file or the time. No checkpoint holds it."
            )
        names = ", ".join(f"{key!r} of {owner}" for owner, key in changed[:_MAX_NAMES])
        names += " ..." if len(changed) > _MAX_NAMES else ""
        return (
            f"refused\nloss() or forward() changes {names}, and a later loss or gradient depends on it: no checkpoint "
            f"holds it, and each worker would have its own. {_WAYS_OUT}"
        )

    def _compute(self) -> tuple[Whole, dict[str, Tensor]]:
        model = self._model
        model.zero_grad()
        before = {**self._parameters, **self._buffers}  # what a forward pass writes to parameters is refused elsewhere
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in before and value.shape == before[name].shape:
                value.data.copy_(before[name])
        whole = run_whole(model, self._generation.task, self._generation.spec, self._batches, [0])
        gradients = {name: None if one is None else one.clone() for name, one in whole.gradients.items()}
        buffers = {name: value.clone() for name, value in model.named_buffers() if name in self._buffers}
        return Whole(whole.loss, whole.weight, whole.metrics, gradients), buffers


class _Attributes:
    """Plain attributes of some objects, as they were."""

    def __init__(self, owners: Mapping[str, object]) -> None:
        self._owners = owners
        self._before = {
            (name, key): (_copied(value), _saved(value))
            for name, owner in owners.items()
            for key, value in _values_of(owner).items()
        }

    def changed(self) -> list[tuple[str, str]]:
        """Owner and name of those that have another value now."""
        now = {(name, key): value for name, owner in self._owners.items() for key, value in _values_of(owner).items()}
        return [
            place
            for place in {**self._before, **now}
            if place not in now or place not in self._before or not _is_equal(self._before[place][0], now[place])
        ]

    def set_back(self) -> None:
        for owner, key in self.changed():
            target = vars(self._owners[owner])
            if (owner, key) in self._before:
                target[key] = self._before[owner, key][1]()
            else:
                del target[key]


def _values_of(owner: object) -> dict[str, Any]:
    return {key: value for key, value in vars(owner).items() if key not in MODULE_ATTRIBUTES and _is_compared(value)}


def _is_compared(value: Any) -> bool:
    if type(value) in (list, tuple, dict, deque, set):
        return len(value) <= _MAX_ITEMS
    return value is None or isinstance(value, (bool, int, float, complex, str)) or is_plain(value)


def _copied(value: Any) -> Any:
    """For comparisons."""
    if is_plain(value):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple, deque):
        return [_copied(one) for one in value]
    return set(value) if type(value) is set else value


def _saved(value: Any) -> Callable[[], Any]:
    """Returns what gives the object its content back, and returns it."""
    if is_plain(value):
        clone = value.clone()
        return lambda: _filled(value, clone)
    if type(value) is dict:
        items = {key: _saved(one) for key, one in value.items()}
        return lambda: _refilled(value, value.update, {key: one() for key, one in items.items()})
    if type(value) in (list, deque):
        parts = [_saved(one) for one in value]
        return lambda: _refilled(value, value.extend, [one() for one in parts])
    if type(value) is set:
        members = set(value)
        return lambda: _refilled(value, value.update, members)
    if type(value) is tuple:
        own = [_saved(one) for one in value]
        return lambda: (value, [one() for one in own])[0]
    return lambda: value


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    tensor.data.copy_(values)
    return tensor


def _refilled(container: Any, add: Callable[[Any], None], content: Any) -> Any:
    container.clear()
    add(content)
    return container


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
            return False
        return one.device == other.device and torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if one is other:
        return True
    return isinstance(one, (bool, int, float, complex, str, set)) and type(one) is type(other) and one == other


def _is_same(one: tuple[Whole, dict[str, Tensor]], other: tuple[Whole, dict[str, Tensor]]) -> bool:
    (first, buffers), (second, other_buffers) = one, other
    numbers = [(first.loss, second.loss), (first.weight, second.weight)]
    tensors = [(first.gradients[name], second.gradients[name]) for name in first.gradients]
    tensors += [(value, other_buffers.get(name)) for name, value in buffers.items()]
    return all(_is_near(*pair) for pair in numbers) and all(_are_near(*pair) for pair in tensors)


def _is_near(one: float, other: float) -> bool:
    return one == other or (one != one and other != other) or abs(one - other) <= _SAME * abs(one)


def _are_near(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is None and other is None
    return torch.allclose(one, other, rtol=0, atol=_SAME * float(one.abs().max()) if one.numel() else 0, equal_nan=True)
