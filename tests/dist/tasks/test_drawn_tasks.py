"""Drawn tasks train as a plain loop does: at one worker, in a drawn layout, resumed, after a death, in another layout.

Or they are refused in one sentence before the first step. `make fuzz-tasks` draws more of them; see tests/kit/fuzz.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.fuzz.draw import draw
from kit.fuzz.lives import Limits
from kit.fuzz.outcome import outcome_of

SEEDS = (*range(1, 24), 3006, 3018, 3022, 3026, 3027, 3029, 3031)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_task_is_right_in_every_way_or_refused(seed: int, fleet: Any) -> None:
    found = outcome_of(fleet, draw(seed), Limits(run_s=120.0))
    assert found.is_good, found
