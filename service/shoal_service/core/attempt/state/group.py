"""The group of the current generation; between two generations, of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal_service.core.attempt.state.persistent.int_map import IntMap
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
    levels: tuple[Layout, ...] = ()
    """The planned layout and its rivals at other shard levels; the group's own is one of them. See group/levels.py."""
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
    exits: IntMap[WorkerExit] = field(default_factory=IntMap)
    """By worker index: how the workers that have left `run` left it, the first one first."""

    @property
    def ranks(self) -> Mapping[int, int]:
        """Rank by worker index."""
        return _ranks_of(self.workers)

    def rank_of(self, index: int) -> int | None:
        return self.ranks.get(index)


_newest: list[tuple[tuple[int, ...], dict[int, int]]] = [((), {})]
"""A memo of `_ranks_of` for the group that was asked about last. To search the tuple for each event would take long."""


def _ranks_of(workers: tuple[int, ...]) -> dict[int, int]:
    known, ranks = _newest[0]
    if known is not workers:
        ranks = {index: rank for rank, index in enumerate(workers)}
        _newest[0] = (workers, ranks)
    return ranks
