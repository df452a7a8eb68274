"""Refuses what a loop does to its state within a micro-batch: each rank has other ones, and another number of them.

    from run.batches() to run.update()    what is tracked keeps its values; numbers, buffers (buffers.py), optimizers
                                          and their parameters may change
    from a backward pass to the update    gradients change alike on all ranks, if at all (gradient_samples.py)
    at run.update()                       parameters are the same on all ranks
    the first update of an optimizer      what it trains is tracked
    from update to update                 buffers that no checkpoint holds keep their values
    in step() of an own optimizer         what changes is in its state, its groups, or a number

In the first updates of a generation, gradients in all of them, and by value, because torch does not count all writes.
The first three not if the job never has a second worker: then its program is its loop. Called by `Run` on the training
thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal_workers.engine.loop.gradient_samples import GradientSamples
from shoal_workers.engine.loop.tracked import Tracked, own_attributes
from shoal_workers.engine.parallel.written import mark_of
from shoal_workers.engine.step.update import is_plain
from shoal_workers.engine.task.code_owner import line_of_attribute
from shoal_workers.engine.task.reachable import marks, reachable

_WATCHED_UPDATES = 2
_WATCHED_STEPS = 5
_MOST_CHANGES = 2
_SMALL = (1 << 20) - 1
"""Up to here a number and its square have exact sums."""


class MicroBatchWatch:
    """What one rank tracks, in one generation."""

    def __init__(self, tracked: Tracked, *, is_alone: bool) -> None:
        self._tracked = tracked
        self._num_updates = _WATCHED_UPDATES if is_alone else 0
        self._before: dict[str, object] | None = None
        """None outside of micro-batches."""
        self._seen: set[int] = set()
        self._gradients = GradientSamples([] if is_alone else tracked.optimizers().values())
        self._num_steps = 0
        self._fleeting: dict[str, tuple[tuple[torch.Size, object], int]] = {}
        """Shape and mark of each buffer that no checkpoint holds, at the last update, and how often it has changed."""

    def begin(self) -> None:
        """A micro-batch begins, perhaps after another one of the same step. Raises ValueError."""
        self._compare()
        if self._num_updates < _WATCHED_UPDATES:
            self._before = self._marks()

    def begin_backward(self) -> None:
        self._gradients.begin_backward()

    def end_backward(self) -> None:
        self._gradients.end_backward()

    def end(self, optimizer: Optimizer) -> list[float]:
        """An update begins. Returns this rank's numbers, of which `check` gets the sums over all ranks. Raises
        ValueError."""
        self._compare()
        self._before = None
        self._compare_fleeting()
        if id(optimizer) not in self._seen:
            self._refuse_untracked(optimizer)
        self._seen.add(id(optimizer))
        gradients = self._gradients.end(optimizer)
        if self._num_updates >= _WATCHED_UPDATES:
            return [0.0, 0.0, *gradients]
        self._num_updates += 1
        whole = [parameter for parameter in self._tracked.parameters() if not isinstance(parameter, DTensor)]
        number = float(hash(tuple(map(_mark, whole))) & _SMALL)
        return [number, number**2, *gradients]

    def check(self, optimizer: Optimizer, sums: Sequence[float], world_size: int, step: int) -> None:
        """Called by all ranks with the sums of what `end` returned. Raises ValueError."""
        number, square, *gradients = sums
        if world_size * square != number**2:
            raise ValueError(
                f"the parameters differ between ranks in step {step}, before the update: a forward pass, or the loop "
                "between run.batches() and the update, writes to them, and each rank has other micro-batches. Change "
                "them after the update, once run.steps(optimizer) has returned True."
            )
        self._gradients.check(optimizer, gradients)

    def end_step(self) -> None:
        self._gradients.forget()

    def step(self, optimizer: Optimizer) -> None:
        """Steps it. Raises ValueError."""
        self._num_steps += 1
        if not own_attributes(optimizer) or self._num_steps > _WATCHED_STEPS:
            optimizer.step()
            return
        groups, modules = optimizer.param_groups, self._tracked.modules().values()
        inner = [module for tracked in modules for module in tracked.modules()]
        known = {*map(id, (optimizer, optimizer.state, groups, *groups, *inner, *self._tracked.parameters()))}

        def found() -> dict[str, object]:
            attributes = {key: value for key, value in own_attributes(optimizer).items() if not is_plain(value)}
            return marks(reachable(attributes, known))

        before = found()
        optimizer.step()
        now = found()
        for path in {**before, **now}:
            if before.get(path) != now.get(path):
                name, line = type(optimizer).__name__, line_of_attribute(optimizer, re.split(r"\W", path)[0])
                raise ValueError(
                    f"step() of {name} changes {path!r}{line and f' ({line})'}, which its state_dict() does not have: "
                    "it would begin anew after a lost worker. Two ways out: keep tensors in self.state[parameter], and "
                    "numbers as attributes of the optimizer; or give it state_dict() and load_state_dict()."
                )

    def _compare_fleeting(self) -> None:
        """Refuses what has changed in two updates in a row: what is filled once is a cache."""
        if self._num_steps > _WATCHED_STEPS:
            return
        last, self._fleeting = self._fleeting, {}
        for name, module, key in self._tracked.fleeting_buffers():
            if not isinstance(value := getattr(module, key, None), Tensor) or isinstance(value, DTensor):
                continue
            now = value.shape, _mark(value)
            before, num_changes = last.get(name, (now, 0))
            num_changes += now != before and value.shape == before[0]
            self._fleeting[name] = now, num_changes
            if num_changes >= _MOST_CHANGES:
                line = line_of_attribute(module, key)
                raise ValueError(
                    f"the buffer {name}{line and f' ({line})'} changes from step to step, and it has persistent=False: "
                    "no checkpoint holds it, and each rank has its own. Two ways out: register it with "
                    "persistent=True, and its changes are added up; or compute it anew in each forward pass, without a "
                    "buffer."
                )

    def _marks(self) -> dict[str, object]:
        return {
            path: _mark(one) if isinstance(one, Tensor) else one for path, one in self._tracked.kept_in_micro_batches()
        }

    def _compare(self) -> None:
        before, self._before = self._before, None
        now = self._marks() if before is not None else {}
        for path, mark in (before or {}).items():
            if now.get(path) != mark:
                raise ValueError(
                    f"{path.replace('/', '.')}, which is tracked, changes between run.batches() and the update: each "
                    "rank has other micro-batches, so each would have other values. Change it after the update, once "
                    "run.steps(optimizer) has returned True; or make it a buffer of a tracked module, whose changes "
                    "are added up."
                )

    def _refuse_untracked(self, optimizer: Optimizer) -> None:
        tensors = [*self._tracked.collect()[0].values()]
        places = {tensor.data_ptr() for tensor in tensors if not isinstance(tensor, DTensor)}
        missing = [
            one
            for group in optimizer.param_groups
            for one in group["params"]
            if one.requires_grad and one.numel() and not isinstance(one, DTensor) and one.data_ptr() not in places
        ]
        copies = {_mark(tensor) for tensor in tensors if not isinstance(tensor, DTensor)} if missing else set()
        for parameter in missing:
            if _mark(parameter) not in copies:
                raise ValueError(
                    f"the update is of a parameter of shape {list(parameter.shape)} that nothing in run.track() has: a "
                    "new worker would begin with other values. Track the module that has it: run.track(head=head, ...)."
                )


def _mark(tensor: Tensor) -> tuple[int, ...]:
    """Equal for equal values."""
    value = tensor.detach()
    return mark_of(value if value.is_complex() else value.double(), is_hashed=True)[1:]
