"""The key `sweep` of a spec: the array of jobs that a job belongs to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal_workers.contract.base import Frozen

SWEEP_LABEL = "sweep"
"""Each job of a sweep has this label; its value is the name of the sweep."""


SWEEP_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"


class SweepSpec(Frozen):
    """Jobs of one project with the same `sweep.name` are a sweep. `shoal sweep` sets it."""

    name: str = Field(pattern=SWEEP_NAME)
    """Letters, digits, and inner dashes, dots and underscores. Also the value of the job's label `sweep`."""
    limit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """The job starts only while fewer jobs of the sweep than this have workers; null: no limit."""
    prune: Literal["median"] | None = None
    """median: the job is ended when its validation loss at a step is worse than the median of the other jobs of the
    sweep at this step; its training loss, if it does not validate under way. null: never."""
    warmup_steps: int = Field(20, ge=1, le=2**53)
    """The job is not ended for what it has reached before this step."""


def add_label(name: str, labels: dict[str, str]) -> None:
    """Gives a job the label of its sweep. Raises ValueError: the label is another one."""
    if labels.setdefault(SWEEP_LABEL, name) != name:
        raise ValueError(
            f"labels.{SWEEP_LABEL} is {labels[SWEEP_LABEL]!r}, and sweep.name is {name!r}. Leave the label out: it is "
            "set from sweep.name."
        )
