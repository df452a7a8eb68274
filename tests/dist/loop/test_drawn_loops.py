"""Drawn loops train as plain torch does: at one worker, at two, and resumed, killed and resized.

`make fuzz-loops` draws more of them; see tests/kit/fuzz/loops.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.fuzz.lives import Limits
from kit.fuzz.loops import MISPLACED, draw_loop, misplaced
from kit.fuzz.outcome import outcome_of


@pytest.mark.cells(2, 4)
@pytest.mark.parametrize("seed", [3, 4, 8, 14])
def test_a_drawn_loop_is_right_in_every_way(seed: int, fleet: Any) -> None:
    found = outcome_of(fleet, draw_loop(seed), Limits(run_s=120.0))
    assert found.is_good, found


def test_what_belongs_to_a_step_and_is_done_in_each_micro_batch_is_refused(fleet: Any) -> None:
    """The loop of seed 4 reads batches; a rank has two micro-batches or one."""
    loops = {what: misplaced(draw_loop(4), what) for what in MISPLACED}
    outcomes = {what: outcome_of(fleet, loop, Limits(run_s=120.0)) for what, loop in loops.items()}
    assert {what: found for what, found in outcomes.items() if found.outcome != "refused"} == {}


@pytest.mark.parametrize("seed", [5008, 5014])
def test_a_large_buffer_that_a_forward_pass_replaces_is_that_of_plain_torch(seed: int, fleet: Any) -> None:
    assert draw_loop(seed).choices["buffer"] == "replaced" and draw_loop(seed).choices["buffer_size"] > 1 << 14
    found = outcome_of(fleet, draw_loop(seed), Limits(run_s=120.0))
    assert found.outcome == "equal", found
