"""Which single steps and events of a job stay once the job has come far beyond them.

    steps   1 ......... 4096 | 4097 ....... 8192 | ......      the newest KEPT_STEPS
            #  #####    #  # | #    #          # | ##################################
            first, around an incident, extremes                all of them

Roll-ups (store/curves.py) keep the shape of the curve. The single steps that stay are those that a mean would hide or
that a reader asks for by number. `store/thinning.py` deletes the others while the job trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KEPT_STEPS = 131_072
"""The newest steps of a job, all of which stay; and the newest roll-ups of each of the finer levels."""
CHUNK = 4_096
"""Steps that are thinned together."""
AROUND = 32
"""Steps that stay before and after a change of the group."""
KEPT_EVENTS = 20_000
"""The newest events of a job, all of which stay. Of older ones those of routine go (`JobEvent.is_routine`)."""
MEASURES = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s")
"""Columns whose smallest, largest and first values of all steps are asked for: `max(loss)` in a condition."""


class Columns(NamedTuple):
    """Steps in their order. A measure is None if it is not finite, or was not reported."""

    step: Sequence[int]
    generation: Sequence[int]
    world_size: Sequence[int]
    val_loss: Sequence[float | None]
    measures: Sequence[Sequence[float | None]]
    """Of MEASURES."""


def steps_to_keep(rows: Columns) -> frozenset[int]:
    """The steps of a chunk that stay.

    Args:
        rows: those of the chunk, and the AROUND steps after it: a group that changes there is an incident for the end
            of the chunk too.
    """
    steps = rows.step
    kept = {steps[0], *(step for step, value in zip(steps, rows.val_loss, strict=True) if value is not None)}
    groups = list(zip(rows.generation, rows.world_size, strict=True))
    for step, before, group in zip(steps[1:], groups, groups[1:], strict=False):
        if group != before:
            kept.update(range(step - AROUND, step + AROUND))
    for column in rows.measures:
        missing = [step for step, value in zip(steps, column, strict=True) if value is None]
        kept.update(missing[:1])
        if values := [value for value in column if value is not None]:
            first, lowest, highest = (column.index(value) for value in (values[0], min(values), max(values)))
            kept.update((steps[first], steps[lowest], steps[highest]))
            kept.update([step for step in missing if step > steps[first]][:1])
    return frozenset(kept)
