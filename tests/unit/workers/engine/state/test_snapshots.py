"""How often snapshots are taken and sent, and which step's copies have arrived at every buddy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.state.snapshots import BuddyCopies, Pace, SnapshotPace
from shoal_workers.engine.step.vote import NO_BUDDY, NOTHING_ARRIVED
from shoal_workers.snapshot_store.transfer.sender import SendCost


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


def _cost(step: int, generation: int = 2, cpu_s: float = 0.5) -> SendCost:
    return SendCost(cpu_s=cpu_s, wall_s=1.0, num_bytes=8, generation=generation, step=step)


def test_a_send_of_the_last_generation_is_neither_a_cost_nor_a_copy_of_this_one() -> None:
    copies = BuddyCopies(2, has_buddy=True)
    assert copies.sent(_cost(9, generation=1)) == 0
    assert copies.arrived_step() == NOTHING_ARRIVED
    copies.voted([copies.arrived_step()], 10)
    assert copies.are_lacking


def test_the_copy_that_was_made_for_a_send_is_part_of_the_cost_of_that_send_only() -> None:
    copies = BuddyCopies(2, has_buddy=True)
    copies.copied(0.25)
    assert copies.sent(None) == 0
    assert copies.sent(_cost(9)) == 0.75
    assert copies.sent(_cost(12)) == 0.5


def test_a_step_is_whole_once_every_rank_with_a_buddy_has_sent_it() -> None:
    copies = BuddyCopies(2, has_buddy=True)
    copies.voted([4.0, NOTHING_ARRIVED, NO_BUDDY], 5)
    assert copies.whole_step is None and copies.are_lacking
    copies.voted([4.0, 4.0, NO_BUDDY], 6)
    assert (copies.whole_step, copies.flight_steps, copies.are_lacking) == (4, 2, False)


def test_a_step_stays_whole_until_every_rank_has_sent_the_same_later_one() -> None:
    copies = BuddyCopies(2, has_buddy=True)
    seen = []
    for arrived in ([4.0, 4.0], [8.0, 4.0], [12.0, 4.0], [12.0, 16.0], [16.0, 16.0]):
        copies.voted(arrived, 18)
        seen.append(copies.whole_step)
    assert seen == [4, 4, 4, 4, 16]


def test_a_step_of_which_a_rank_has_dropped_its_own_part_is_not_whole_any_more() -> None:
    copies, without_buddy = BuddyCopies(2, has_buddy=True), BuddyCopies(2, has_buddy=False)
    copies.sent(_cost(4))
    for one in (copies, without_buddy):
        one.voted([copies.arrived_step(), without_buddy.arrived_step()], 5)
    assert copies.whole_step == 4
    for holds_whole in (False, True, True):
        dropped = [copies.arrived_step(), without_buddy.arrived_step(holds_whole=holds_whole)]
        copies.voted(dropped, 7)
        assert copies.whole_step is None and copies.are_lacking, "nor does it come back"
    copies.sent(_cost(8))
    copies.voted([copies.arrived_step(), without_buddy.arrived_step()], 9)
    assert copies.whole_step == 8


def test_without_buddies_no_copy_is_lacking() -> None:
    copies = BuddyCopies(2, has_buddy=False)
    copies.voted([copies.arrived_step(), NO_BUDDY], 1)
    assert copies.whole_step is None and not copies.are_lacking
