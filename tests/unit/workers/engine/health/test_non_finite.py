"""A step that is not finite is a worker's fault only if it is finite, and bit for bit the same, when it is repeated."""

from __future__ import annotations

import pytest

from shoal_workers.engine.health.non_finite import Pass, WrongPass, find_wrong_pass

GOOD, OTHER = Pass(7, True, True), Pass(8, True, True)
BAD_LOSS, BAD_NORM = Pass(0, False, False), Pass(7, True, False)
HONEST = [GOOD] * 3


def test_the_rank_whose_loss_was_not_finite_computed_wrong() -> None:
    assert find_wrong_pass([HONEST, [BAD_LOSS, GOOD, GOOD], HONEST], computes_whole_samples=True) == WrongPass(1)


@pytest.mark.parametrize(
    ("passes", "whole"),
    [
        ([HONEST, [BAD_LOSS, GOOD, GOOD]], False),
        ([[BAD_LOSS, GOOD, GOOD], [BAD_LOSS, GOOD, GOOD]], True),
        ([[BAD_NORM, GOOD, GOOD], [BAD_NORM, GOOD, GOOD]], True),
    ],
    ids=["ranks compute parts of a sample", "on several ranks", "in the gradient only"],
)
def test_no_rank_is_named_if_several_may_have_computed_wrong(passes: list[list[Pass]], whole: bool) -> None:
    assert find_wrong_pass(passes, computes_whole_samples=whole) == WrongPass(None)


@pytest.mark.parametrize(
    "passes",
    [
        [HONEST, [BAD_LOSS, BAD_LOSS, BAD_LOSS]],
        [HONEST, [BAD_LOSS, BAD_LOSS, GOOD]],
        [HONEST, [BAD_LOSS, GOOD, BAD_NORM]],
        [HONEST, [BAD_LOSS, GOOD, OTHER]],
        [[GOOD, OTHER, OTHER], [BAD_LOSS, GOOD, GOOD]],
    ],
    ids=["always", "twice", "gradient again", "differs from pass to pass", "differs on another rank"],
)
def test_a_task_that_is_not_finite_again_or_differs_from_pass_to_pass_accuses_nobody(passes: list[list[Pass]]) -> None:
    assert find_wrong_pass(passes, computes_whole_samples=True) is None
