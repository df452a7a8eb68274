"""The stages of an attempt, the table of transitions between them, and what each stage alone has to know.

Attempt.current holds one of the classes below. A field that has a meaning in one stage only cannot be read in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal_workers.contract.layout import ParallelismSpec


class Stage(StrEnum):
    """Where the attempt stands. The diagram in docs/architecture.md is generated from TRANSITIONS."""

    OPENING = "opening"
    """The storage is asked which checkpoint is the newest."""
    STARTING = "starting"
    """Workers start, and no group was formed yet."""
    WAITING = "waiting"
    """No group can form yet: too few workers are warm, they do not fit into the memory of their nodes, a back-off runs,
    or snapshots are looked for. The stage has a deadline."""
    FORMING = "forming"
    """`run(generation)` was sent; the group forms and restores."""
    RUNNING = "running"
    QUIESCING = "quiescing"
    """The group is lost: survivors are interrupted. The next group forms when every `run` has returned and the
    snapshots in memory are known."""
    SWITCHING = "switching"
    """The group was asked to stop at the next step boundary (to grow, shrink or pause), or its workers are leaving
    after the last step."""
    COMMITTING = "committing"
    """Every worker of the group has left `run` as planned; the durable checkpoint of that step is being committed."""
    FALLING_BACK = "falling_back"
    """The checkpoint to restore was damaged or is not trusted, and the storage is asked for an older one."""
    ENDED = "ended"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.OPENING: frozenset({Stage.STARTING, Stage.ENDED}),
    Stage.STARTING: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.WAITING: frozenset({Stage.FORMING, Stage.ENDED}),
    Stage.FORMING: frozenset({Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING, Stage.ENDED}),
    Stage.RUNNING: frozenset({Stage.SWITCHING, Stage.QUIESCING, Stage.ENDED}),
    Stage.SWITCHING: frozenset({Stage.QUIESCING, Stage.COMMITTING, Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.QUIESCING: frozenset({Stage.FORMING, Stage.WAITING, Stage.FALLING_BACK, Stage.COMMITTING, Stage.ENDED}),
    Stage.COMMITTING: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.FALLING_BACK: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyStage:
    since: float
    """Wall-clock time at which the stage began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for a checkpoint, in a storage that may not answer."""

    num_failures: int = 0
    error: str = ""
    """Error of the last try; empty if no try has failed."""
    retry_at: float | None = None
    """Wall-clock time at which the storage is asked again; None if its answer is waited for."""
    is_missing: bool = False
    """The storage answered last, without the checkpoints that the job has committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(_AnyStage):
    search: Search = Search()
    stage: Literal[Stage.OPENING] = Stage.OPENING


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting(_AnyStage):
    stage: Literal[Stage.STARTING] = Stage.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(_AnyStage):
    orphans_until: float | None = None
    """Until this time the next group waits for workers that were started on nodes with unreported snapshots; None if no
    such workers were started. See memory_snapshots.py."""
    refused: str = ""
    """Why the usable workers cannot form a group: the memory that they need on a node; empty if there are too few of
    them."""
    stage: Literal[Stage.WAITING] = Stage.WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming(_AnyStage):
    stage: Literal[Stage.FORMING] = Stage.FORMING


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the layout depends on while an attempt lasts; the rest of the spec cannot change."""

    num_workers: int
    parallelism: Literal["auto"] | ParallelismSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(_AnyStage):
    draining_since: float | None = None
    """When a worker of the group first had to leave; None if all may stay."""
    kept_layout_for: PlanInputs | None = None
    """Inputs for which a layout was planned last and the group kept its own. They are not planned for again."""
    stage: Literal[Stage.RUNNING] = Stage.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiescing(_AnyStage):
    __pydantic_config__: ClassVar = ConfigDict(extra="ignore")
    """Unknown fields are ignored. This is a part of wire version 3."""
    interrupt_at: float | None = None
    """The workers of the group are not interrupted before this time; None if they have been interrupted."""
    interrupted_at: float | None = None
    durable: bool
    """True if the group had been asked for a durable checkpoint before it was lost, as in Switching."""
    stage: Literal[Stage.QUIESCING] = Stage.QUIESCING


@dataclass(frozen=True, slots=True, kw_only=True)
class Switching(_AnyStage):
    durable: bool
    """True if the next group starts from a durable checkpoint of the step boundary; False if from
    the snapshot of that step in memory."""
    stage: Literal[Stage.SWITCHING] = Stage.SWITCHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing(_AnyStage):
    stage: Literal[Stage.COMMITTING] = Stage.COMMITTING


@dataclass(frozen=True, slots=True, kw_only=True)
class FallingBack(_AnyStage):
    search: Search = Search()
    stage: Literal[Stage.FALLING_BACK] = Stage.FALLING_BACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(_AnyStage):
    stage: Literal[Stage.ENDED] = Stage.ENDED


CurrentStage = Annotated[
    Opening | Starting | Waiting | Forming | Running | Quiescing | Switching | Committing | FallingBack | Ended,
    Field(discriminator="stage"),
]
