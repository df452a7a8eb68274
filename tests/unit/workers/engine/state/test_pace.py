from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.state.snapshots import Pace, SnapshotPace


def noted(budget: float, step_s: float, cost_s: float, times: int = 20) -> Pace:
    pace = Pace(budget)
    for _ in range(times):
        pace.note_step(step_s)
        pace.note_cost(cost_s)
    return pace


def test_a_thing_is_done_every_step_until_its_cost_is_known() -> None:
    pace = Pace(0.01)
    assert pace.every_steps == 1
    pace.note_step(1.0)
    pace.note_cost(100.0)  # cold memory, of both slots
    pace.note_cost(100.0)
    assert pace.every_steps == 1


def test_a_cheap_thing_is_done_every_step() -> None:
    assert noted(0.01, step_s=1.0, cost_s=0.009).every_steps == 1


def test_an_expensive_action_waits_the_number_of_steps_that_the_budget_requires() -> None:
    assert noted(0.01, step_s=0.1, cost_s=0.02).every_steps == 20


@given(st.floats(0.001, 1), st.floats(1e-3, 100), st.floats(1e-4, 100))
def test_the_share_stays_near_the_budget(budget: float, step_s: float, cost_s: float) -> None:
    pace = noted(budget, step_s, cost_s)
    assert pace.share <= budget * 1.0001


def test_small_changes_do_not_change_the_pace() -> None:
    pace = noted(0.01, step_s=0.1, cost_s=0.02)
    for _ in range(50):
        pace.note_step(0.1)
        pace.note_cost(0.018)
    assert pace.every_steps == 20


def test_the_pace_returns_when_the_cost_falls() -> None:
    pace = noted(0.01, step_s=0.1, cost_s=0.02)
    for _ in range(50):
        pace.note_step(0.1)
        pace.note_cost(0.0005)
    assert pace.every_steps == 1


@pytest.mark.parametrize(
    ("copy_s", "send_s", "copies", "sends"),
    [
        (0.001, 0.002, 1, 1),
        (0.006, 0.009, 1, 2.25),
        (0.0085, 0.008, 1.25, 2.75),
        (0.015, 0.005, 2, 2),
        (0.0, 0.02, 1, 2),
        (0.03, 0.03, 3.75, 15),
    ],
)
def test_copies_and_sends_share_one_budget(copy_s: float, send_s: float, copies: float, sends: float) -> None:
    pace = SnapshotPace(0.01)
    for _ in range(40):
        pace.note(1.0, copy_s, send_s)
    assert (pace.copies.every_steps, pace.sends.every_steps) == (copies, sends)
    assert pace.share <= 0.01 + 1e-9


def test_a_fractional_interval_is_met_on_average() -> None:
    pace = noted(0.01, step_s=0.1, cost_s=0.0024)
    assert pace.every_steps == 2.5

    done = []
    for step in range(100, 200):
        if pace.is_due(step):
            pace.done(step)
            done.append(step)

    assert len(done) == 40
    assert {b - a for a, b in pairwise(done)} == {2, 3}


def test_doing_a_thing_early_delays_the_next() -> None:
    pace = noted(0.01, step_s=0.1, cost_s=0.004)
    pace.done(10)
    pace.done(11)
    assert not pace.is_due(14)
    assert pace.is_due(15)
