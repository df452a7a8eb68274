"""A mixture of experts over ep, tp and both is the one of a single process: outputs, gradients, loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

pytestmark = pytest.mark.dist

_LAYOUTS = ("ep2", "ep4", "ep2 x tp2", "tp2", "tp4")
_VARIANTS = ("three experts", "ranks without tokens", "uneven width", "balance loss", "capacity", "recomputed")


@pytest.fixture(scope="module")
def differs(answer_of: Callable[..., dict[str, float]]) -> dict[str, float]:
    """What four processes saw: the largest difference of each case."""
    return answer_of("expert_layouts.py")


def _too_far(differs: dict[str, float], cases: Iterable[str]) -> dict[str, float]:
    return {case: differs[case] for case in cases if not differs[case] < 1e-6}


def test_outputs_and_all_gradients_are_those_of_one_process(differs: dict[str, float]) -> None:
    assert _too_far(differs, _LAYOUTS) == {}


def test_losses_are_equal_in_every_variant(differs: dict[str, float]) -> None:
    cases = (f"{layout}, {variant}" for layout, variant in itertools.product(_LAYOUTS, _VARIANTS))
    assert _too_far(differs, cases) == {}


def test_summands_may_be_added_at_the_experts_output(differs: dict[str, float]) -> None:
    assert _too_far(differs, (f"{layout}, added up at the experts" for layout in ("ep2 x tp2", "tp2"))) == {}


def test_capacity_and_balance_are_those_of_whole_sequences_if_ranks_have_parts(differs: dict[str, float]) -> None:
    assert _too_far(differs, ("cp2", "cp2, balance loss", "cp2, ep4", "cp2, ep4, balance loss")) == {}


def test_a_rank_may_have_an_empty_part_of_an_expert(differs: dict[str, float]) -> None:
    assert differs["tp4, width less than tp"] < 1e-6


def test_fsdp_splits_parameters_further_that_ep_has_split(differs: dict[str, float]) -> None:
    assert differs["ep2, shared expert"] < 1e-6
    assert differs["ep2, fully sharded"] < 1e-6


def test_a_rank_stores_only_its_part_of_the_initial_weights(differs: dict[str, float]) -> None:
    assert differs["initial weights"] == 0
