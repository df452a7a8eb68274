"""The variables of a running loop, as values that can be compared."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal_workers.engine.loop.variables import difference, values_of

HERE = Path(__file__).parent


class Holder:
    def __init__(self) -> None:
        self.weights = {"a": torch.zeros(3)}
        self.me = self


def test_equal_states_have_no_difference_and_others_name_their_path() -> None:
    one, other = Holder(), Holder()
    assert difference(values_of(one, HERE), values_of(other, HERE)) is None
    other.weights["a"][1] = 0.25
    found = difference(values_of(one, HERE), values_of(other, HERE))
    assert found is not None and (found.path, found.words) == ("weights.a", "differs by 0.25")
    assert values_of(one, HERE / "elsewhere") == {}, "its class is none of the program's"
    layer = nn.Linear(2, 2)
    before = values_of(layer, HERE)
    with torch.no_grad():
        layer.bias += 0.5
    found = difference(before, values_of(layer, HERE))
    assert found is not None and (found.path, found.words) == ("bias", "differs by 0.5")


@pytest.mark.parametrize("generator", [torch.Generator(), random.Random(1)])
def test_a_generator_that_has_drawn_is_another(generator: torch.Generator | random.Random) -> None:
    before = values_of(generator, HERE)
    torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
    found = difference(before, values_of(generator, HERE))
    assert found is not None and found.words == "has another value"


def test_rounding_is_no_difference_and_a_missing_value_is_none() -> None:
    a = {"x": torch.ones(4), "n": 1.0, "old": 3.0}
    assert difference(a, {"x": torch.ones(4) * (1 + 1e-7), "n": 1.0 + 1e-8, "new": 2.0}) is None
    found = difference(a, {"x": torch.ones(4), "n": 2.0})
    assert found is not None and found.words == "2 instead of 1"
    nan = torch.tensor([float("nan"), 1.0])
    assert difference({"x": nan}, {"x": nan.clone()}) is None


def test_a_tensor_is_compared_by_what_it_has_changed_and_with_what_rounding_alone_does() -> None:
    first, before = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.001, 0.999])}
    near, far = {"w": torch.tensor([1.001, 0.999 + 5e-8])}, {"w": torch.tensor([1.001, 0.99901])}
    assert difference(before, far) is None, "a hundredth of a small change"
    found = difference(before, far, first=first)
    assert found is not None and found.path == "w"
    assert difference(before, near, first=first) is None
    turned = [{"w": torch.tensor([1.001, 1.001])}, {"w": torch.tensor([1.001, 0.999])}]
    assert difference(before, {"w": torch.tensor([1.001, 1.001])}, first=first, others=turned) is None
    found = difference(before, far, first=first, others=[before, {"w": torch.tensor([1.001, 0.999 + 1e-7])}])
    assert found is not None, "rounding changes it by less"
