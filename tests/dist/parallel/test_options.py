"""Recomputation, compilation and bf16 reductions on two ranks: the losses do not change, bit for bit without
rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.matrix]

_AXES = ("fsdp", "tp", "all_gather", "ulysses")
_TOKENS_PER_RANK = {"fsdp": 5 * 2 * 16, "tp": 5 * 4 * 16, "all_gather": 5 * 4 * 8, "ulysses": 5 * 4 * 8}


@pytest.fixture(scope="module")
def found(answer_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Losses and counts of every case."""
    return answer_of("option_losses.py")


@pytest.mark.parametrize("axis", _AXES)
def test_every_axis_gives_the_same_losses(found: dict[str, Any], axis: str) -> None:
    losses = found[axis]["losses"]
    assert losses == pytest.approx(found["fsdp"]["losses"], abs=1e-5)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("axis", _AXES)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_bit_and_counts_once(found: dict[str, Any], axis: str, mode: str) -> None:
    assert found[f"{axis} {mode}"]["losses"] == found[axis]["losses"]
    assert found[f"{axis} {mode}"]["counts"] == [_TOKENS_PER_RANK[axis]] * 2


@pytest.mark.parametrize(
    "case",
    [
        "fsdp compiled",
        "fsdp selective compiled",
        "fsdp full compiled",
        "all_gather full compiled",
        "ulysses full compiled",
    ],
)
def test_compiled_blocks_give_the_same_losses_and_count_once(found: dict[str, Any], case: str) -> None:
    axis = case.split()[0]
    assert found[case]["losses"] == pytest.approx(found[axis]["losses"], abs=1e-5)
    assert found[case]["counts"] == [_TOKENS_PER_RANK[axis]] * 2


@pytest.mark.parametrize("case", ["fsdp reduces bf16", "fsdp reduces fp16", "fsdp bf16", "fsdp bf16 reduces bf16"])
def test_small_dtypes_cost_little_precision_and_do_round(found: dict[str, Any], case: str) -> None:
    assert found[case]["losses"] == pytest.approx(found["fsdp"]["losses"], abs=2e-2)
    assert found[case]["losses"] != found["fsdp"]["losses"]
