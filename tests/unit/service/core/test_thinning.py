"""Which single steps of a chunk stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.downsampling import AROUND, MEASURES, Columns, steps_to_keep


@dataclass(frozen=True)
class Row:
    step: int
    generation: int = 1
    world_size: int = 2
    val_loss: float | None = None
    loss: float | None = 1.0
    grad_norm: float | None = 1.0
    lr: float | None = 1.0
    tokens_per_s: float | None = 1.0
    step_s: float | None = 1.0


def rows(first: int, last: int) -> list[Row]:
    return [Row(step) for step in range(first, last + 1)]


def kept(steps: Sequence[Row]) -> frozenset[int]:
    step, generation, world_size, val_loss, *measures = zip(*map(astuple, steps), strict=True)
    return steps_to_keep(Columns(step, generation, world_size, val_loss, measures))


def test_of_undisturbed_steps_that_are_all_equal_the_first_one_stays() -> None:
    assert kept(rows(1, 500)) == {1}


def test_a_change_of_the_group_keeps_the_steps_around_it() -> None:
    changed = rows(1, 499) + [replace(row, generation=2) for row in rows(500, 1_000)]
    assert kept(changed) >= set(range(500 - AROUND, 500 + AROUND))
    smaller = rows(1, 499) + [replace(row, world_size=1) for row in rows(500, 1_000)]
    assert kept(smaller) == kept(changed)


@given(values=st.lists(st.none() | st.floats(0, 9), min_size=1, max_size=60), column=st.sampled_from(MEASURES))
def test_extremes_and_first_values_are_those_of_all_steps(values: Sequence[float | None], column: str) -> None:
    every = [replace(Row(step), **{column: value}) for step, value in enumerate(values, 1)]
    left = [row for row in every if row.step in kept(every)]

    def asked(steps: Sequence[Row]) -> tuple[object, ...]:
        known = [value for row in steps if (value := getattr(row, column)) is not None]
        begins = next((row.step for row in steps if getattr(row, column) is not None), 0)
        lost = (row.step for row in steps if getattr(row, column) is None and row.step > begins)
        return min(known, default=None), max(known, default=None), begins, next(lost, None) if begins else None

    assert asked(left) == asked(every)


def test_every_validation_stays() -> None:
    validated = [replace(row, val_loss=0.5) if row.step % 7 == 0 else row for row in rows(1, 300)]
    assert kept(validated) >= set(range(7, 301, 7))
