"""What a task's loss may return, and how everything else is refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from shoal_workers.contract.worker_reports import MAX_METRICS, MAX_NAME_CHARS, is_metric_name, suggested_name
from shoal_workers.engine.task.returned import place_of, read_returned

LOSS = torch.tensor(2.5, requires_grad=True)


def _loss(model: Any, batch: Any) -> Any:
    return None


def test_a_scalar_tensor_is_a_loss_without_metrics() -> None:
    for loss in (LOSS, torch.ones(1, 1)):
        returned = read_returned(loss, _loss)
        assert returned.loss is loss
        assert returned.metrics == {}


def test_metrics_are_sorted_scalars_without_a_graph() -> None:
    values = {
        "z": LOSS * 2,
        "half": torch.ones(1, 1, dtype=torch.float16),
        "count": torch.tensor(3),
        "hit": torch.tensor(True),
        "number": 0.5,
        "flag": True,
        "numpy": np.float32(0.25),
        "ratio": Fraction(1, 4),
    }
    returned = read_returned((LOSS, values), _loss)
    assert list(returned.metrics) == sorted(values)
    assert {name: value.item() for name, value in returned.metrics.items()} == {
        "z": 5.0,
        "half": 1.0,
        "count": 3.0,
        "hit": 1.0,
        "number": 0.5,
        "flag": 1.0,
        "numpy": 0.25,
        "ratio": 0.25,
    }  # fmt: skip - one case a line
    assert all(value.shape == () and value.is_floating_point() for value in returned.metrics.values())
    assert not any(value.requires_grad for value in returned.metrics.values())
    assert returned.metrics["half"].dtype == torch.float32
    assert returned.loss is LOSS


@pytest.mark.parametrize("weight", [3, 3.0, np.float32(3), torch.tensor(3), torch.tensor([3.0], dtype=torch.bfloat16)])
def test_a_sum_has_a_weight_and_may_have_metrics(weight: Any) -> None:
    for rest in ((), ({"a": 0.5},)):
        returned = read_returned((LOSS, weight, *rest), _loss)
        assert returned.loss is LOSS
        assert returned.weight is not None and returned.weight.dtype == torch.float64
        assert returned.weight.shape == () and returned.weight.item() == 3.0
        assert list(returned.metrics) == [name for one in rest for name in one]
    nothing = read_returned((LOSS, 0), _loss).weight
    assert nothing is not None and nothing.item() == 0.0
    assert read_returned((LOSS, {"a": 0.5}), _loss).weight is None


def test_many_metrics_are_allowed_up_to_the_limit() -> None:
    names = [f"m{number}" for number in range(MAX_METRICS)]
    assert len(read_returned((LOSS, dict.fromkeys(names, 1.0)), _loss).metrics) == MAX_METRICS
    with pytest.raises(ValueError, match=rf"returned {MAX_METRICS + 1} metrics, and at most {MAX_METRICS} are allowed"):
        read_returned((LOSS, dict.fromkeys([*names, "one_more"], 1.0)), _loss)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "it returned None."),
        (1.5, "it returned a float."),
        (torch.ones(3), "it returned a tensor of shape (3,)."),
        ({"loss": LOSS}, "it returned a dict."),
        (
            (LOSS, "0.5"),
            "a tensor of shape () and a str. Return a scalar tensor, the mean over the micro-batch, or (sum, weight)",
        ),
        ((LOSS,), "returned a tuple of 1 values"),
        ((LOSS, 1.0, 2.0), "returned a tuple of 3 values"),
        ((LOSS, {}, 1.0), "returned a tuple of 3 values"),
        ((), "returned a tuple of 0 values"),
        (
            (1.5, 2),
            "must return a scalar tensor, the sum over the micro-batch, before its weight; it returned a float.",
        ),
        (
            (LOSS, -1.0),
            "returned the weight -1. Return how much of the micro-batch counts: a finite number of 0 or more",
        ),
        ((LOSS, torch.tensor(float("inf"))), "returned the weight inf. Return how much"),
        ((LOSS, float("nan"), {}), "returned the weight nan. Return how much"),
        ((LOSS, torch.ones(4)), "returned a tensor of shape (4,) as the weight. Return how much"),
        ((LOSS, LOSS * 2), "returned a weight that depends on the model's parameters"),
        ((torch.ones(2), {}), "before its metrics; it returned a tensor of shape (2,)."),
        ((LOSS, {"a": "0.5"}), "returned the metric 'a' as a str, '0.5'. A value is one number"),
        ((LOSS, {"a": None}), "returned the metric 'a' as None. A value is one number"),
        ((LOSS, {"a": torch.ones(4)}), "'a' as a tensor of shape (4,). A value is one number: the mean over"),
        ((LOSS, {"a": torch.tensor(1j)}), "of complex numbers"),
        ((LOSS, {"top 1": 1.0}), "_ . - /, and begins with a letter: for example 'top_1'."),
        ((LOSS, {5: 1.0}), "the name 5, which is not allowed"),
    ],
)  # fmt: skip - one case a line
def test_everything_else_is_refused_with_the_place_and_the_way_out(returned: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as caught:
        read_returned(returned, _loss)
    assert str(caught.value).startswith(f"loss() ({place_of(_loss)}) ")


def test_a_place_is_file_and_line_also_of_a_bound_method() -> None:
    class Task:
        def loss(self) -> None: ...

    assert re.fullmatch(r"test_returned\.py:\d+", place_of(Task().loss))
    assert place_of(len) == "builtin_function_or_method"


@pytest.mark.parametrize("name", ["a", "acc/top-1", "F1.macro", "x" * MAX_NAME_CHARS])
def test_allowed_names(name: str) -> None:
    assert is_metric_name(name)
    assert suggested_name(name) == name


@pytest.mark.parametrize("name", ["", "1st", "a b", "ä", "x" * (MAX_NAME_CHARS + 1), "a\n", 'a"', "_a", None, 3])
def test_names_that_are_not_allowed_have_a_suggestion_that_is(name: object) -> None:
    assert not is_metric_name(name)
    assert is_metric_name(suggested_name(name))
