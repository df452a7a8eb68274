"""When an island's rounds end and land, if each is closed in time."""

from __future__ import annotations

import pytest

from shoal_workers.contract.islands import IslandsSpec
from shoal_workers.engine.islands.islands import Progress


@pytest.mark.parametrize(
    ("every", "lands", "num_steps", "rounds"),
    [
        (4, 1, 14, [(4, 5), (8, 9), (12, 13), (13, 14)]),
        (4, 2, 14, [(4, 6), (8, 10), (12, 14)]),
        (64, 42, 256, [(64, 106), (128, 170), (214, 256)]),
        (64, 60, 256, [(64, 124), (128, 188), (196, 256)]),
        (64, 60, 100, [(40, 100)]),
        (64, 60, 50, [(1, 50)]),
        (4, 1, 1, []),
    ],
)
def test_the_last_round_lands_in_the_last_step_and_no_other_one_holds_it_up(
    every: int, lands: int, num_steps: int, rounds: list[tuple[int, int]]
) -> None:
    spec = IslandsSpec(num=2, every_steps=every, lands_after_steps=lands)
    progress, seen = Progress(), []
    for step in range(1, num_steps + 1):
        num_left = num_steps - step
        if (ended := progress.sent_step) and progress.lands_in(step, spec, num_left):
            seen.append((ended, step))
            progress = progress.after_landing(ended)
        if progress.ends_with(step, spec, num_left):
            progress = progress.after_end(step, progress.round)
    assert seen == rounds
