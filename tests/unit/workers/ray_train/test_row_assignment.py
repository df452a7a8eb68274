"""Rows of a dataset are read once, whatever the number of ranks, before and after a group is resumed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.ray_train.row_assignment import (
    Piece,
    Ranges,
    Reading,
    RowAssigner,
    among_left,
    number_of,
    positions_of,
    rows_read,
    union,
    without,
)

Rounds = list[list[list[Piece]]]


def _rounds(blocks: list[int], world_size: int, chunk: int, taken: Ranges) -> tuple[Rounds, tuple[int, int]]:
    """All rounds of a pass; the block of a piece is the number of its first row."""
    assigner = RowAssigner(world_size, chunk, taken)
    rounds: Rounds = []
    first = 0
    for rows in blocks:
        rounds += assigner.add(first, rows)
        first += rows
    width, last = assigner.end()
    return rounds + ([last] if last else []), (len(rounds), width)


def _rows(rounds: Rounds, rank: int) -> list[int]:
    return [
        row
        for one in rounds
        for piece in one[rank]
        for row in range(piece.block + piece.first, piece.block + piece.last)
    ]


def test_a_round_is_one_batch_for_each_rank_in_the_order_of_the_dataset() -> None:
    rounds, tail = _rounds([5, 7, 5], world_size=2, chunk=3, taken=[])
    assert _rows(rounds, 0) == [0, 1, 2, 6, 7, 8, 12, 13]
    assert _rows(rounds, 1) == [3, 4, 5, 9, 10, 11, 14, 15]
    assert tail == (2, 2), "two ranks share the last five rows equally, and one row is left out"


def test_ranges() -> None:
    assert union([(4, 6)], [(0, 2), (2, 3)], [(5, 9), (7, 7)]) == [(0, 3), (4, 9)]
    assert without(0, 10, [(2, 4), (8, 12)]) == [(0, 2), (4, 8)]
    assert without(2, 4, [(0, 9)]) == []
    assert among_left([(0, 3), (5, 6)], taken=[(1, 4)]) == [(0, 1), (4, 6), (8, 9)]
    assert among_left([(0, 2)], taken=[]) == [(0, 2)]
    assert number_of([(0, 3), (4, 9)]) == 8


def test_ranks_in_step_have_read_the_beginning_of_the_dataset() -> None:
    assert rows_read([], [Reading(12, 4), Reading(12, 4)]) == [(0, 24)]


def test_a_rank_that_is_ahead_leaves_a_gap() -> None:
    assert rows_read([], [Reading(4, 4), Reading(8, 4)]) == [(0, 8), (12, 16)]


@given(
    blocks=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    groups=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 30), min_size=4, max_size=4)),
        max_size=4,
    ),
    last=st.tuples(st.integers(1, 4), st.integers(1, 6)),
)
def test_every_row_is_read_once_over_any_number_of_groups(
    blocks: list[int], groups: list[tuple[int, int, list[int]]], last: tuple[int, int]
) -> None:
    """Each group reads some rows on each rank, dies, and leaves its position to the next; the last one reads the
    rest."""
    taken: Ranges = []
    read: list[int] = []
    for world_size, chunk, wanted in groups:
        rounds, tail = _rounds(blocks, world_size, chunk, taken)
        readings = []
        for rank in range(world_size):
            rows = _rows(rounds, rank)[: wanted[rank]]
            read += rows
            readings.append(Reading(len(rows), chunk, tail if len(rows) > tail[0] * chunk else None))
        taken = rows_read(taken, readings)
        assert sorted(read) == [row for first, end in taken for row in range(first, end)]
    world_size, chunk = last
    rounds, _ = _rounds(blocks, world_size, chunk, taken)
    of_ranks = [_rows(rounds, rank) for rank in range(world_size)]
    assert len({len(rows) for rows in of_ranks}) == 1, "as many batches on every rank"
    read += [row for rows in of_ranks for row in rows]
    assert len(read) == len(set(read)), "no row twice"
    assert sum(blocks) - len(read) < world_size, "no more is left out than cannot be shared equally"
    assert all(one[1] < other[0] for one, other in pairwise(taken))


def test_a_dataset_between_two_passes_has_no_position() -> None:
    assert positions_of(
        [{"train": None, "test": ([], Reading(4, 4))}, {"train": None, "test": ([], Reading(4, 4))}]
    ) == {"test": [(0, 8)]}


def test_a_rank_that_is_through_the_pass_has_read_its_part() -> None:
    ended, ahead = None, ([(0, 8)], Reading(6, 4, (1, 2)))
    assert positions_of([{"train": ended}, {"train": ahead}]) == {"train": [(0, 20)]}


def test_a_pass_that_was_not_begun_again_keeps_its_position() -> None:
    assert positions_of([{"train": ([(0, 8)], None)}, {"train": ([(0, 8)], None)}]) == {"train": [(0, 8)]}
