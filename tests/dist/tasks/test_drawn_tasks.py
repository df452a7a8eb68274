"""Drawn tasks train as a plain loop does: at one worker, in a drawn layout, resumed, after a death, in another layout.

Or they are refused in one sentence before the first step. `make fuzz-tasks` draws more of them; see tests/kit/fuzz.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kit.fuzz.draw import READING, Description, Optim, Piece, Ways, draw
from kit.fuzz.kinds import LOSSES, SPELLINGS
from kit.fuzz.lives import Limits
from kit.fuzz.outcome import outcome_of

SEEDS = (*range(1, 4), *range(5, 18), *range(19, 25), 34, 3006, 3018, 3022, 3026, 3027, 3029, 3031)
SPELLED = (4052, 4009, 4015, 4001, 4043, 4036, 4038, 4005, 4004, 4002)
_ONE, _TWO = ({"dp_replicate": 1, "dp_shard": size, "shard": "full"} for size in (1, 2))
_WAYS = Ways(layout=_TWO, resumed=_ONE, killed=None, survived=_ONE, changed=None)
_EQUAL = {"reached attribute", "reached computed", "carried buffer", "attributes own_scaled", "attributes adamw"}


@pytest.mark.cells(len(SEEDS))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_task_is_right_in_every_way_or_refused(seed: int, fleet: Any) -> None:
    found = outcome_of(fleet, draw(seed), Limits(run_s=120.0))
    assert found.is_good, found


@pytest.mark.cells(3, 6)
@pytest.mark.parametrize("seed", SPELLED)
def test_a_task_with_a_drawn_spelling_is_right_in_every_way_or_refused(seed: int, fleet: Any) -> None:
    found = outcome_of(fleet, draw(seed, plans=0.0, spelled=1.0), Limits(run_s=120.0))
    assert found.is_good, found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_spelling_is_trained_as_a_plain_loop_does_or_refused(fleet: Any) -> None:
    """The smallest task with each of them; which of them are refused is known."""
    outcomes = {name: outcome_of(fleet, task, Limits(run_s=120.0)) for name, task in _spelled_tasks()}
    differing = {
        name: (outcome.outcome, outcome.run, outcome.detail[:200])
        for name, outcome in outcomes.items()
        if outcome.outcome != ("equal" if name in _EQUAL else "refused")
    }
    assert differing == {}


def _spelled_tasks() -> Iterator[tuple[str, Description]]:
    for kind in ("written_parameter", "reached", "carried"):
        [(option, choices)] = SPELLINGS[kind].items()
        for choice in choices:
            yield f"{kind} {choice}", Description(seed=1, pieces=(Piece(kind, {option: choice}),), ways=_WAYS)
    yield "number", Description(seed=1, pieces=(Piece("number", {}),), ways=_WAYS)
    plain = Description(seed=1, pieces=(Piece("linear", {"bias": True}),), ways=_WAYS)
    for loss in LOSSES:
        yield loss, replace(plain, loss=loss)
    yield "attributes own_scaled", replace(plain, optim=READING)
    options = {"declared": None, "amsgrad": False, "maximize": False, "fused": None}
    yield "attributes adamw", replace(plain, optim=Optim("adamw", options, "by_attribute"))
