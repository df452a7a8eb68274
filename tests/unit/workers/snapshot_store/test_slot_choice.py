"""Which slot stays: a generation's own newest, before that the one that it was restored from."""

from __future__ import annotations

import pytest

from shoal_workers.snapshot_store.slot import PartHeader
from shoal_workers.snapshot_store.slot_choice import kept, oldest_first


def _part(generation: int, step: int) -> PartHeader:
    return PartHeader(2, generation, 0, 1, step, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("slots", "generation", "restored", "stays"),
    [
        ([], 1, None, None),
        ([None, None], 1, None, None),
        ([(1, 4), None], 1, None, (1, 4)),
        ([(1, 4), (1, 5)], 1, None, (1, 5)),
        ([(1, 11), (1, 10)], 2, (1, 10), (1, 10)),  # rolled back: the step that not every rank has goes
        ([(2, 11), (1, 10)], 2, (1, 10), (2, 11)),  # the new generation has one of its own
        ([(2, 11), (1, 40)], 2, (1, 10), (2, 11)),  # more steps, but of a life that was given up
        ([(1, 11), (1, 10)], 2, None, (1, 11)),  # restored from storage
        ([(1, 11), (1, 10)], 2, (1, 9), (1, 11)),  # restored from a part that is not here
        ([(1, 3), (2, 5), (3, 7)], 4, (2, 5), (2, 5)),
    ],
)
def test_slot_that_stays(
    slots: list[tuple[int, int] | None],
    generation: int,
    restored: tuple[int, int] | None,
    stays: tuple[int, int] | None,
) -> None:
    headers = [None if slot is None else _part(*slot) for slot in slots]
    header = kept(headers, generation=generation, restored=restored)
    assert (None if header is None else (header.generation, header.step)) == stays


def test_of_two_of_the_same_step_the_one_written_last_stays() -> None:
    first, second = _part(1, 5), PartHeader(8, 1, 0, 1, 5, 0, 0, 0, 0, 0, 0)
    assert kept([second, first], generation=1, restored=None) is second


def test_what_is_not_complete_is_written_over_first() -> None:
    slots = [_part(2, 1), _part(1, 9), None, _part(1, 8)]
    assert sorted(slots, key=oldest_first) == [None, _part(1, 8), _part(1, 9), _part(2, 1)]
