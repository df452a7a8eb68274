"""Context parallelism is exact: outputs, losses and gradients are those of one process, at cp 2 and 4, both methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.dist

_METHODS = ("all_gather", "ulysses")
_DEGREES = ("cp2", "cp4")
_HEADS = ("4/4", "4/2", "4/1", "12/3")


@pytest.fixture(scope="module")
def differs(answer_of: Callable[..., dict[str, float]]) -> dict[str, float]:
    """What four processes saw: the largest difference of each case."""
    return answer_of("context_attention.py")


def test_attention_over_ranks_equals_attention_in_one_process(differs: dict[str, float]) -> None:
    limits = {
        f"{method} {degree} {heads} {dtype}": limit
        for method, degree, heads in itertools.product(_METHODS, _DEGREES, _HEADS)
        for dtype, limit in (("float32", 1e-6), ("bfloat16", 2e-2))
    }
    assert {case: differs[case] for case, limit in limits.items() if not differs[case] < limit} == {}


def test_a_model_with_positions_has_the_same_loss_and_gradients(differs: dict[str, float]) -> None:
    cases = [f"{method} {degree} model" for method, degree in itertools.product(_METHODS, _DEGREES)]
    assert {case: differs[case] for case in cases if not differs[case] < 1e-6} == {}
