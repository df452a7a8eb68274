"""Rows of a dataset are read once, whatever the number of ranks; and the list of a run's checkpoints."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.ray_train.run_directory import Manifest, Retention
from shoal_workers.ray_train.shards import (
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


def _reported(losses: list[float | None], retention: Retention) -> tuple[Manifest, list[str]]:
    """After reports with a checkpoint each; None: a report without one."""
    manifest, dropped = Manifest(), []
    for number, loss in enumerate(losses):
        name = None if loss is None else f"c{number}"
        manifest, names = manifest.with_report(retention, name, {"loss": loss, "eval": {"loss": loss}})
        dropped += names
    return manifest, dropped


def _names(manifest: Manifest) -> list[str]:
    return [one.name for one in manifest.kept]


def test_without_a_limit_all_are_kept_in_their_order() -> None:
    manifest, dropped = _reported([3.0, None, 1.0, 2.0], Retention())
    assert (_names(manifest), dropped) == (["c0", "c2", "c3"], [])
    assert manifest.newest is not None and manifest.newest.name == "c3"
    assert (manifest.next_index, [one.index for one in manifest.kept]) == (4, [0, 2, 3])


def test_the_newest_are_kept() -> None:
    manifest, dropped = _reported([3.0, 1.0, 2.0, 4.0], Retention(num_to_keep=2))
    assert (_names(manifest), dropped) == (["c2", "c3"], ["c0", "c1"])


@pytest.mark.parametrize("attribute", ["loss", "eval/loss"])
def test_the_best_are_kept_and_the_newest_whatever_its_score(attribute: str) -> None:
    manifest, dropped = _reported([1.0, 3.0, 2.0, 4.0], Retention(2, attribute, "min"))
    assert (_names(manifest), dropped) == (["c3", "c2", "c0"], ["c1"]), "the worst first"
    later, names = manifest.with_report(Retention(2, attribute, "min"), "c4", {"loss": 1.5, "eval": {"loss": 1.5}})
    assert (_names(later), names) == (["c4", "c0"], ["c3", "c2"])


@pytest.mark.parametrize("loss", [math.nan, "none"])
def test_what_is_no_number_is_worse_than_any(loss: float | str) -> None:
    manifest, _ = Manifest().with_report(Retention(1, "loss"), "c0", {"loss": loss})
    manifest, _ = manifest.with_report(Retention(1, "loss"), "c1", {"loss": -1e9})
    assert _names(manifest) == ["c1"]


def test_a_list_is_what_was_written() -> None:
    manifest, _ = _reported([3.0, None, 1.0], Retention())
    assert Manifest.from_text(manifest.to_text("2.60.0")) == manifest
    assert Manifest.from_text(Manifest().to_text("2.60.0")) == Manifest()
