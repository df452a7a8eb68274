"""Which step every buddy has: from the votes of all ranks, never from one rank alone."""

from __future__ import annotations

from shoal_workers.engine.state.snapshots import BuddyCopies
from shoal_workers.engine.step.vote import NO_BUDDY, NOTHING_ARRIVED
from shoal_workers.snapshot_store.transfer.sender import SendCost


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
