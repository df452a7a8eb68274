"""Which slots stay and which may be overwritten: decided from their headers alone."""

import pytest

from shoal_workers.snapshot_store.slots import retention
from shoal_workers.snapshot_store.slots.slot_files import PartHeader


def _part(generation: int, step: int, rank: int = 0) -> PartHeader:
    return PartHeader(2, generation, rank, 1, step, 0, 0, 0, 0, 0, 0)


def _headers(*slots: tuple[int, ...] | None) -> list[PartHeader | None]:
    return [None if slot is None else _part(*slot) for slot in slots]


@pytest.mark.parametrize(
    ("slots", "generation", "restored", "stays"),
    [
        ([], 1, None, None),
        ([None, None], 1, None, None),
        ([(1, 4), None], 1, None, (1, 4)),
        ([(1, 4), (1, 5)], 1, None, (1, 5)),
        ([(1, 11), (1, 10)], 2, (1, 10), (1, 10)),  # rolled back: not every rank has step 11, so it may go
        ([(2, 11), (1, 10)], 2, (1, 10), (2, 11)),  # the new generation has one of its own
        ([(2, 11), (1, 40)], 2, (1, 10), (2, 11)),  # more steps, but of a generation that was rolled back
        ([(1, 11), (1, 10)], 2, None, (1, 11)),  # restored from storage
        ([(1, 11), (1, 10)], 2, (1, 9), (1, 11)),  # restored from a part in another process
        ([(1, 3), (2, 5), (3, 7)], 4, (2, 5), (2, 5)),
    ],
)
def test_own_slot_that_must_stay(
    slots: list[tuple[int, int] | None],
    generation: int,
    restored: tuple[int, int] | None,
    stays: tuple[int, int] | None,
) -> None:
    position = retention.kept(_headers(*slots), generation=generation, restored=restored)
    assert (None if position is None else slots[position]) == stays


def test_of_two_parts_of_the_same_step_the_later_one_stays() -> None:
    first, second = _part(1, 5), PartHeader(8, 1, 0, 1, 5, 0, 0, 0, 0, 0, 0)
    assert retention.kept([second, first], generation=1, restored=None) == 0


def test_incomplete_slots_are_overwritten_first_then_the_oldest() -> None:
    headers = _headers((2, 1), (1, 9), None, (1, 8), (3, 1))
    assert retention.overwritable(headers, generation=3, restored=None, held=()) == [2, 3, 1, 0]


def test_held_slots_are_not_overwritten() -> None:
    headers = _headers((1, 6), (1, 7), None, (1, 8))
    assert retention.overwritable(headers, generation=1, restored=None, held=(0, 2)) == [1]


def test_nothing_is_overwritable_if_the_only_slot_must_stay() -> None:
    assert retention.overwritable(_headers((1, 6)), generation=1, restored=None, held=()) == []


@pytest.mark.parametrize(
    ("has_copy", "num_since_sent", "num_slots"), [(False, 1, 3), (False, 9, 3), (True, 1, 3), (True, 2, 4)]
)
def test_a_fourth_slot_is_needed_only_if_some_snapshots_are_not_sent(
    has_copy: bool, num_since_sent: int, num_slots: int
) -> None:
    assert retention.num_own_slots(has_copy=has_copy, num_since_sent=num_since_sent) == num_slots


def test_live_slot_that_the_group_was_restored_from_is_not_reused() -> None:
    headers = _headers((1, 10), (1, 9), None)
    assert retention.reusable_live(headers, restored=(1, 10)) == [1, 2]
    assert retention.reusable_live(headers, restored=None) == [0, 1, 2]


def test_next_copy_of_a_rank_replaces_its_older_copy_before_it_takes_an_empty_slot() -> None:
    headers = _headers((1, 4, 7), None, (1, 5, 7), (1, 4, 8))
    assert retention.reusable_for_copy(headers, generation=1, rank=7) == [0, 1]


def test_single_copy_of_a_rank_and_copies_of_other_generations_are_not_replaced() -> None:
    headers = _headers((2, 4, 7), (1, 2, 7), (1, 3, 7), None)
    assert retention.reusable_for_copy(headers, generation=2, rank=7) == [3]


def test_the_copy_of_a_step_of_which_every_rank_has_one_is_not_replaced() -> None:
    headers = _headers((1, 4, 7), (1, 8, 7))
    assert retention.reusable_for_copy(headers, generation=1, rank=7, keep_step=8) == [0]
    assert retention.reusable_for_copy(headers, generation=1, rank=7, keep_step=4) == [1]


def test_two_empty_buddy_slots_stay_allocated() -> None:
    assert retention.surplus_empty(_headers(None, (1, 1), None, None, None)) == [3, 4]
    assert retention.surplus_empty(_headers(None, (1, 1), None)) == []


def test_parts_of_earlier_generations_and_incomplete_parts_are_outdated() -> None:
    assert retention.is_outdated(None, before=2)
    assert retention.is_outdated(_part(1, 99), before=2)
    assert not retention.is_outdated(_part(2, 1), before=2)
