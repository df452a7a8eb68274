"""Finds what a loop begins late to do to gradients between backward passes and the update, or to parameters between
updates, by a few elements.

    backward | ... | backward      another micro-batch of the step: no gradient changes, because each rank has another
                                   number of them, and every gradient is that of a part of the step
    backward | update              all ranks multiply an element by the same factor, and so they multiply the sum by it.
                                   A norm of this rank alone would give each rank its own factor
    update | ... | update          parameters are equal on all ranks. A weight decay or a reset that a rank decides by
                                   its own loss makes them other ones

What a loop does in the first updates is proven (proof.py), and may be right: gradients that are centred, for example.
What begins later, as a clip of gradients that have become large, was not proven and is refused: the first on this rank;
factors travel with the vote, as sums over all ranks. Whether factors of ranks differ in the first updates is state: a
clip may have begun when a group goes on from a restore. Called by `Run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal_workers.engine.loop.sharded import plain_parameters

_NUM_PARAMETERS = 4
_NUM_ELEMENTS = 4
"""Elements of each of them."""
_NUM_SAMPLES = _NUM_PARAMETERS * _NUM_ELEMENTS
_NUM_FACTORS = 3 * _NUM_SAMPLES
_NUM_ROUNDINGS = 4
"""Roundings of a gradient's type: a smaller difference between factors is none."""
_PROVEN_UPDATES = 2
"""First updates of an optimizer in a generation."""
_SAME = 1e-3
"""Relative difference of parameters between ranks that rounding never makes, also of unlike processors."""
_SMALLEST = 1e-30
"""Smaller gradients have few bits."""


class LateChanges:
    """Those of one rank. Training thread only."""

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        order: Mapping[int, int] | None = None,
        are_factors_usual: dict[str, bool] | None = None,
    ) -> None:
        """`order`: see `plain_parameters`. `are_factors_usual`: by name of an optimizer that several ranks have updated
        `_PROVEN_UPDATES` times, whether their factors differed in these updates; is added to."""
        self._names = {id(optimizer): name for name, optimizer in optimizers.items()}
        self._are_factors_usual = {} if are_factors_usual is None else are_factors_usual
        self._parameters = {
            id(optimizer): _trained(plain_parameters(optimizer, order)) for optimizer in optimizers.values()
        }
        self._places = {key: list(_places(parameters)) for key, parameters in self._parameters.items()}
        self._before: dict[int, Tensor] = {}
        """By optimizer: what the last backward pass since the last update has left."""
        self._touched: dict[int, Tensor] = {}
        """By optimizer: whether something has changed before another backward pass."""
        self._num_updates: dict[int, int] = {}
        self._usual: set[tuple[int, str]] = set()
        """What was done in the first updates, by optimizer."""

    def begin_backward(self) -> None:
        for key, before in self._before.items():
            is_touched = (self._values(key) != before).any()
            self._touched[key] = self._touched[key] | is_touched if key in self._touched else is_touched

    def end_backward(self) -> None:
        self._before = {key: self._values(key) for key, places in self._places.items() if places}

    def end(self, optimizer: Optimizer) -> list[float]:
        """An update begins. Returns for each element of a gradient whether it is known by what it was multiplied, by
        what, and the square of that; then elements of parameters, other ones in each update, and their squares.

        Raises:
            ValueError: gradients were changed before another backward pass.
        """
        key = id(optimizer)
        self._num_updates[key] = self._num_updates.get(key, 0) + 1
        before, is_touched = self._before.get(key), self._touched.get(key)
        now = None if before is None else self._values(key).tolist()
        self.forget()
        if is_touched is not None and is_touched and self._begins_late(key, "between"):
            raise ValueError(
                f"the gradients of {type(optimizer).__name__} change between two micro-batches of a step, as by "
                "zero_grad() or clip_grad_norm_(), and they are those of a part of the step. Two ways out: clip by "
                "run.steps(optimizer, clip=...), which also forgets them; or change them after the last micro-batch."
            )
        pairs = [] if before is None or now is None else zip(before.tolist(), now, strict=True)
        sums = [
            number
            for old, new in pairs
            for number in ((1.0, new / old, (new / old) ** 2) if abs(old) > _SMALLEST else (0.0, 0.0, 0.0))
        ]
        values = self._values_in_turn(key)
        return [*sums, *[0.0] * (_NUM_FACTORS - len(sums)), *values, *(value**2 for value in values)]

    def forget(self) -> None:
        """An update begins, or a step is complete."""
        self._before, self._touched = {}, {}

    def check(self, optimizer: Optimizer, sums: Sequence[float], world_size: int) -> None:
        """`sums`: over all ranks. Raises ValueError if they have multiplied an element by different factors, or have
        different parameters."""
        types = [torch.float32, *(parameter.dtype for parameter, _ in self._places.get(id(optimizer), ()))]
        factors_of, values = sums[:_NUM_FACTORS], sums[_NUM_FACTORS:]
        rounding = _NUM_ROUNDINGS * max(torch.finfo(dtype).eps for dtype in types)
        for num, factors, squares in zip(factors_of[::3], factors_of[1::3], factors_of[2::3], strict=True):
            differs = num * squares - factors**2 > rounding**2 * num * squares
            if differs and self._begins_late(id(optimizer), "after"):
                raise ValueError(
                    "the loop changes gradients after run.backward(), by another factor on each rank, which knows only "
                    "those of its own micro-batches: clip_grad_norm_() does. Two ways out: clip by "
                    "run.steps(optimizer, clip=...), which knows those of the global batch; or multiply them by the "
                    "same factors on all ranks."
                )
        if self._num_updates[id(optimizer)] <= _PROVEN_UPDATES:
            name = self._names.get(id(optimizer))
            if name is not None and world_size > 1 and self._num_updates[id(optimizer)] == _PROVEN_UPDATES:
                self._are_factors_usual.setdefault(name, (id(optimizer), "after") in self._usual)
            return
        for first in range(0, _NUM_SAMPLES, _NUM_ELEMENTS):
            totals, square_sums = values[first:][:_NUM_ELEMENTS], values[_NUM_SAMPLES + first :][:_NUM_ELEMENTS]
            largest = world_size * sum(square_sums)
            if largest - sum(total**2 for total in totals) > _SAME**2 * largest:
                raise ValueError(
                    f"the parameters of {type(optimizer).__name__} differ between ranks: a rank has changed its own, "
                    "or a setting of its optimizer. Two ways out: decide by run.loss or run.step, which are equal on "
                    "all ranks; or by run.agree(flag)."
                )

    def _begins_late(self, key: int, what: str) -> bool:
        name = self._names.get(key)
        if what == "after" and name in self._are_factors_usual:
            return not self._are_factors_usual[name]
        if self._num_updates[key] <= _PROVEN_UPDATES:
            self._usual.add((key, what))
        return (key, what) not in self._usual

    def _values_in_turn(self, key: int) -> list[float]:
        """Elements of parameters, others in each update."""
        parameters, number = self._parameters.get(key), self._num_updates[key]
        if not parameters:
            return [0.0] * _NUM_SAMPLES
        chosen = [parameters[(_NUM_PARAMETERS * number + i) % len(parameters)] for i in range(_NUM_PARAMETERS)]
        numbers = range(number, number + _NUM_ELEMENTS)
        return torch.cat([_elements(p, torch.tensor([n % p.numel() for n in numbers])) for p in chosen]).tolist()

    def _values(self, key: int) -> Tensor:
        """Those that are missing or not finite are 0."""
        return torch.cat([_elements(parameter.grad, elements) for parameter, elements in self._places[key]])


def _places(parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Some parameters, the first and the last among them, each with numbers of some of its elements."""
    for number in _spread(len(parameters), _NUM_PARAMETERS).tolist():
        parameter = parameters[number]
        yield parameter, _spread(parameter.numel(), _NUM_ELEMENTS).to(parameter.device)


def _trained(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad and p.numel() and p.is_floating_point()]


def _spread(num: int, most: int) -> Tensor:
    return torch.linspace(0, max(0, num - 1), min(num, most), dtype=torch.float64).long()


def _elements(tensor: Tensor | None, elements: Tensor) -> Tensor:
    if tensor is None or tensor.layout is not torch.strided:
        return torch.zeros(len(elements), dtype=torch.float64, device=elements.device)
    return tensor.detach().reshape(-1)[elements].double().nan_to_num(0.0, 0.0, 0.0)
