"""Refuses a task that changes, within a pass, parameters that the optimizer does not have, for example those of a
teacher that follows the model.

Ranks run different micro-batches, and different numbers of them, so such a change would be another one on each rank and
at each world size; and it would also change the snapshot of the step before. Buffers have a rule for changes, and may
be changed. Torch counts operations in place, but not those through `.data`, and an assignment to `.data` gives a tensor
another storage. So the counts of all parameters are compared around each step; around the first one of a generation
also the storage and some elements of each parameter, and later those of a few parameters in turn, so that a frozen part
costs a step next to nothing. Nothing waits for a GPU: whether elements differ is read with the vote. What a forward
pass writes to a gathered parameter is noticed in `CollectiveOrder`. Called by the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from shoal_workers.engine.parallel.device_copies import any_of
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.update import Update
from shoal_workers.torch_internals import is_same_storage, local_of

_SAMPLES = 16
"""Elements of a parameter that are compared, evenly spread."""
_IN_TURN = 4
"""Parameters whose elements are compared around a step."""


class FrozenParameters:
    """Those of one model, in one generation. Training thread only."""

    def __init__(self, generation: Generation, update: Update) -> None:
        self._generation = generation
        parameters = dict(update.frozen_parameters())
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._next = 0
        self._chosen: tuple[int, ...] = tuple(range(len(parameters)))
        self._before: list[Mark] = []
        self._counts: list[int] = []
        self._doubts: list[tuple[int, Tensor]] = []
        """Parameters, and whether their elements have changed in the newest passes: a bool scalar on the device."""

    def begin(self) -> None:
        """Called before the passes of a step."""
        if self._parameters:
            self._counts = [count_of(parameter) for parameter in self._parameters]
            self._before = [Mark.of(self._parameters[number]) for number in self._chosen]

    def check(self) -> None:
        """Called after the passes of a step, before `doubt`.

        Raises:
            TaskFailed: torch has counted that the task has changed one.
        """
        counts = zip(self._counts, self._parameters, strict=False)  # before the first step there are no counts
        changed = {number for number, (count, parameter) in enumerate(counts) if count_of(parameter) != count}
        self._doubts = []
        for number, before in zip(self._chosen, self._before, strict=False):
            now = Mark.of(self._parameters[number])
            if before.has_same_storages(now):
                self._doubts.append((number, (before.samples != now.samples).any()))
            else:
                changed.add(number)
        self._before = []  # no storage is kept alive longer than a step
        num = len(self._names)
        self._chosen = tuple((self._next + number) % num for number in range(min(num, _IN_TURN)))
        self._next += _IN_TURN
        if changed:
            self._refuse(min(changed), len(changed) - 1)

    def doubt(self) -> Tensor | None:
        """For the vote: a bool scalar on the device, whether elements of any have changed. None if none can have."""
        return any_of([has_changed for _, has_changed in self._doubts], self._generation.device)

    def resolve(self) -> None:
        """Called after a vote in which some rank had a doubt. Waits for the device. Raises as `check`."""
        doubts, self._doubts = self._doubts, []
        changed = [number for number, has_changed in doubts if bool(has_changed)]
        if changed:
            self._refuse(min(changed), len(changed) - 1)

    def _refuse(self, number: int, num_others: int) -> None:
        others = f" and {num_others} others" if num_others else ""
        with self._generation.user_code:
            raise ValueError(
                f"{self._generation.task.line_of('loss')}: {self._names[number]}{others} changed while the loss was "
                "computed, but the optimizer does not have it. Each rank computes other micro-batches, so ranks would "
                "have different values. What the optimizer does not change is a buffer: register_buffer(...), whose "
                "changes Shoal adds up over the ranks; for an average of the weights there is optimizer.ema_decay."
            )


def count_of(parameter: Tensor) -> int:
    """How often operations have changed a parameter in place, as a whole or its local part."""
    return parameter._version + (local_of(parameter)._version if isinstance(parameter, DTensor) else 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """The storage and some elements of a parameter at a moment."""

    storages: tuple[UntypedStorage, UntypedStorage]
    """Those of the tensor and of its local part. They stay alive, so that no other one gets the same address."""
    samples: Tensor
    """Bytes of some elements, so that NaN equals itself."""

    @classmethod
    def of(cls, parameter: Tensor) -> Mark:
        local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
        flat = local.detach().reshape(-1)
        samples = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].clone().view(torch.uint8)
        return cls((parameter.untyped_storage(), local.untyped_storage()), samples)

    def has_same_storages(self, now: Mark) -> bool:
        return all(is_same_storage(a, b) for a, b in zip(self.storages, now.storages, strict=True))
