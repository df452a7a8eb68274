"""The group of the current generation; between two generations, of the last one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal_workers.contract.course.settings import TrainingSettings
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import WorkerExit
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.contract.spec import ParallelismSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    generation: int = 0
    """0: no group was formed yet."""
    workers: tuple[int, ...] = ()
    """Worker indexes in rank order."""
    nodes: tuple[str, ...] = ()
    """By rank: the id of the node on which it is."""
    machines: tuple[str, ...] = ()
    """By rank: workers with the same value share one memory."""
    layout: Layout | None = None
    planned_by: Literal["auto"] | ParallelismSpec = "auto"
    """`parallelism` of the spec that the layout was planned for."""
    settings: TrainingSettings | None = None
    """That it trains with."""
    changes: tuple[str, ...] = ()
    """In these settings, against those of the group before."""
    source: SnapshotSource | None = None
    """The snapshot in memory that the group started from; None: from storage, or from the seed."""
    restored: str | None = None
    """Directory name of the newest checkpoint when the group was formed: it restored it unless it had `source`."""
    is_formed: bool = False
    """Rank 0 has reported that all ranks have met and restored the state."""
    has_trained: bool = False
    """The same workers have completed a step in this layout before."""
    start_step: int = 0
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    """By worker index: how the workers that have left `run` left it."""

    def rank_of(self, index: int) -> int | None:
        return self.workers.index(index) if index in self.workers else None
