"""The weights of a mixture's sources, which may change at steps while a job trains: which weights hold from which step.

    spec            data.sources weights | data.changes: at_step 40 | at_step 90
    step            1 ................ 39 | 40 ............... 89 | 90 ...
    trained with    the weights of the sources | those of 40      | those of 90

A group learns of a change when it forms, at the earliest. If it begins after the step of a change, the steps before it
were trained without that change, so the change takes effect at the first step of the group instead. Every checkpoint
and snapshot therefore has the changes that took effect (`began`), and a group goes on from those (`in_force`): what was
trained stays true, and the rest follows the spec. Pure. `spec` carries the changes, the trainer puts them into force,
`data.mixture` makes the order of the samples from them, and the service plans them (`planned`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from shoal_workers.contract.base import Frozen

Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
MAX_CHANGED_WEIGHTS = 1000
"""Largest number of weights in all changes of a job: each checkpoint and each snapshot in memory contains them."""
LEAD_S = 10.0
"""A change that names no step takes effect after this time, in which all workers learn of it."""
_LONGEST_SILENCE_S = 60.0


class WeightChange(Frozen):
    """Other weights for the sources of a mixture, from a step on."""

    at_step: int = Field(ge=1, le=2**53)
    """The first step whose samples have these weights; the first step of a job is step 1."""
    weights: dict[str, Weight] = Field(min_length=1, max_length=MAX_CHANGED_WEIGHTS)
    """A weight for each source, by its `name`, or by its `path` if it has no name; 0: it is not read."""


class InForce(NamedTuple):
    """Weights that hold from a step on."""

    at_step: int
    weights: tuple[float, ...] | None
    """In the order of the sources; None means those that the sources have in the spec."""


def in_force(recorded: Sequence[InForce], wanted: Sequence[InForce], step: int) -> tuple[InForce, ...]:
    """Return the changes of a group that goes on after `step` completed steps.

    Args:
        recorded: what took effect before, as the state that the group restores says.
        wanted: the changes of the spec, in the order of their steps.
    """
    past = tuple(change for change in recorded if change.at_step <= step)
    first = step + 1
    now, before = _weights_at(wanted, first), _weights_at(past, first)
    following = tuple(change for change in wanted if change.at_step > first)
    return past + (() if now == before else (InForce(first, now),)) + following


def began(changes: Sequence[InForce], step: int) -> tuple[InForce, ...]:
    """Those that took effect in the first `step` steps."""
    return tuple(change for change in changes if change.at_step <= step)


def late(wanted: Sequence[InForce], following: Sequence[InForce]) -> InForce | None:
    """Return the change that takes effect at another step than the spec says; None if there is none. `following`:
    `in_force`."""
    planned = set(wanted)
    return next((change for change in reversed(following) if change not in planned), None)


def to_json(changes: Sequence[InForce]) -> list[list[Any]]:
    return [[change.at_step, None if change.weights is None else list(change.weights)] for change in changes]


def from_json(document: Any) -> tuple[InForce, ...]:
    return tuple(
        InForce(int(step), None if weights is None else tuple(map(float, weights))) for step, weights in document
    )


def _weights_at(changes: Sequence[InForce], step: int) -> tuple[float, ...] | None:
    return next((change.weights for change in reversed(changes) if change.at_step <= step), None)


def earliest_step(step: int, step_s: float | None, silent_s: float, *, is_training: bool) -> int:
    """Return the first step for which a change may be planned so that all workers learn of it before.

    Args:
        step: steps that are known to be completed.
        step_s: seconds of a step; None means not known.
        silent_s: seconds since that was known.
        is_training: workers may complete steps meanwhile.
    """
    if not is_training:
        return step + 1
    if step_s is None or step_s <= 0:
        return step + 2
    return step + 2 + math.ceil((LEAD_S + min(max(0.0, silent_s), _LONGEST_SILENCE_S)) / step_s)


def planned(
    changes: Sequence[WeightChange], weights: Mapping[str, float], at_step: int | None, earliest: int
) -> tuple[WeightChange, ...]:
    """Return the changes of a spec with one more. Those that were planned for its step or a later one give way to it.

    `at_step`: None: `earliest`. A change that is the last one already is not planned again: a request may come twice.
    """
    if changes and changes[-1].weights == dict(weights) and at_step in (None, changes[-1].at_step):
        return tuple(changes)
    first = earliest if at_step is None else at_step
    kept = tuple(change for change in changes if change.at_step < first)
    return (*kept, WeightChange(at_step=first, weights=dict(weights)))
