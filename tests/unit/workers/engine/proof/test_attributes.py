"""Attributes of a task, compared with what they were, and set back."""

import functools
import itertools
import math
import queue
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal_workers.engine.proof.attributes import Attributes, carry, far, owners_in_task
from shoal_workers.engine.task.reachable import marks, reachable


def test_a_number_that_is_nan_now_has_changed_and_one_that_was_has_not() -> None:
    task = SimpleNamespace(mean=1.0, unknown=math.nan)
    attributes = Attributes({"the task": task})
    task.mean, task.unknown = math.nan, math.nan
    assert list(attributes.changed()) == [("the task", "mean")]
    attributes.set_back()
    assert task.mean == 1.0


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(1), lambda generator: torch.rand(1, generator=generator).item()),
        (np.random.default_rng(1), lambda generator: generator.random()),
        (np.random.RandomState(1), lambda generator: generator.random_sample()),
        (random.Random(1), lambda generator: generator.random()),
    ],
    ids=["torch", "numpy", "numpy_legacy", "python"],
)
def test_a_generator_that_has_drawn_is_seen_and_set_back(generator: Any, draw: Any) -> None:
    task = SimpleNamespace(generator=generator)
    attributes, before = Attributes({"the task": task}), marks(reachable({"task": task}, ()))
    number = draw(generator)
    assert list(attributes.changed()) == [("the task", "generator")]
    assert marks(reachable({"task": task}, ())) != before
    attributes.set_back()
    assert draw(generator) == number


class Slotted:
    __slots__ = ("__hidden", "never", "value")

    def __init__(self) -> None:
        self.value, self.__hidden = 1.0, [1.0]

    def grow(self) -> list[float]:
        self.value += 1.0
        self.__hidden.append(self.value)
        return [self.value, *self.__hidden]


def kept(values: list[float], more: list[float] = []) -> list[float]:  # noqa: B006
    for one in (values, more):
        one.append(1.0)
    return [*values, -1.0, *more]


@functools.cache
def remembered() -> list[float]:
    return [0.0]


def remember() -> list[float]:
    remembered().append(1.0)
    return list(remembered())


def turned(ring: Any) -> Any:
    ring.put(2.0 * ring.get())
    return list(ring.queue)


def moved(names: Any) -> Any:
    names.move_to_end(next(iter(names)))
    return list(names)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (Slotted, lambda slotted: slotted.grow()),
        (lambda: Slotted().grow, lambda grow: grow()),
        (lambda: functools.partial(kept, [1.0]), lambda partial: partial()),
        (lambda: kept, lambda function: function([])),
        (lambda: remembered, lambda _: remember()),
        (lambda: filled(1.0, 2.0), turned),
        (lambda: OrderedDict(a=1, b=2, c=3), moved),
        (lambda: itertools.count(3, 2), next),
        (lambda: iter([1, 2, 3, 4]), next),
        (lambda: iter(range(9)), next),
    ],
    ids=["slots", "method", "partial", "default", "cache", "queue", "ordered", "count", "list", "range"],
)
def test_what_python_keeps_outside_of_attributes_is_seen_set_back_and_carried(make: Any, use: Any) -> None:
    task = SimpleNamespace(kept=make())
    owners, used = {"the task": task}, [use(task.kept)]
    attributes = Attributes(owners)
    used += [use(task.kept), use(task.kept)]
    later = attributes.changed()
    assert list(later) == [("the task", "kept")] and attributes.unknown() == []
    used.append(use(task.kept))
    attributes.set_back()
    assert [use(task.kept), use(task.kept)] == used[1:3]
    attributes.set_back()
    carry(later, owners)
    assert use(task.kept) == used[3]


def filled(*items: float) -> queue.Queue[float]:
    ring = queue.Queue[float]()
    for item in items:
        ring.put(item)
    return ring


def test_a_pair_of_numbers_is_another_pair_when_it_is_carried() -> None:
    task = SimpleNamespace(pair=(0, 1.0))
    attributes = Attributes({"the task": task})
    task.pair = (1, 0.5)
    later = attributes.changed()
    attributes.set_back()
    assert task.pair == (0, 1.0)
    carry(later, {"the task": task})
    assert task.pair == (1, 0.5)


def test_an_iterator_without_a_position_and_a_cache_of_a_limited_size_are_unknown_once_they_are_used() -> None:
    numbers = (number for number in range(9))
    task = SimpleNamespace(numbers=numbers, zipped=[zip(range(9), range(9), strict=True)], bounded=bounded)
    attributes = Attributes({"the task": task})
    assert attributes.unknown() == [("the task", "zipped")]
    next(numbers)
    bounded(1)
    assert attributes.unknown() == [("the task", name) for name in ("numbers", "zipped", "bounded")]
    attributes.set_back()
    assert bounded.cache_info().currsize == 0


@functools.lru_cache(maxsize=2)
def bounded(number: int) -> int:
    return number


def test_a_tensor_that_is_made_anew_in_another_size_is_no_memory_and_one_that_keeps_its_size_may_be() -> None:
    owner = SimpleNamespace(positions=torch.zeros(2), memory=torch.zeros(2))
    attributes = Attributes({"the task": owner})
    owner.positions, owner.memory = torch.ones(3), torch.ones(2)
    first = attributes.changed()
    owner.positions, owner.memory = torch.ones(4), torch.full((2,), 2.0)
    assert {key for _, key in far(first, attributes.changed())} == {"memory"}


def test_of_a_data_set_only_counters_count() -> None:
    class Lines:
        def __init__(self) -> None:
            self.num_read, self.offsets, self.content = 0, [0], torch.zeros(4)

    class Task:
        pass

    data = Lines()
    owners = {name: owner for name, owner in owners_in_task(Task(), data).items() if owner is data}
    attributes = Attributes(owners)
    data.num_read, data.offsets, data.content = 1, [0, 5], torch.ones(4)
    assert {key for _, key in attributes.changed()} == {"num_read"}
