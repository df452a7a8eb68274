"""Attributes of a task, compared with what they were, and set back."""

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal_workers.engine.proof.attributes import Attributes
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
