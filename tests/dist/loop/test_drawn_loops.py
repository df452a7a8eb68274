"""Drawn loops train as plain torch does: at one worker, at two, and resumed, killed and resized.

`make fuzz-loops` draws more of them; see tests/kit/fuzz/loops.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.fuzz.lives import Limits
from kit.fuzz.loops import draw_loop
from kit.fuzz.outcome import outcome_of


@pytest.mark.cells(2, 4)
@pytest.mark.parametrize("seed", [3, 4, 8, 14])
def test_a_drawn_loop_is_right_in_every_way(seed: int, fleet: Any) -> None:
    found = outcome_of(fleet, draw_loop(seed), Limits(run_s=120.0))
    assert found.is_good, found
