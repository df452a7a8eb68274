"""Which snapshots lie in the memory of nodes, reported by workers outside the group; the others are in Group.exits."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_service.core.attempt.state.persistent.int_map import IntMap
from shoal_workers.contract.snapshots import SnapshotPart


@dataclass(frozen=True, slots=True)
class Discarded:
    """Generations, both included, that trained with code that was rolled back."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotIndex:
    requested: IntMap[float] = field(default_factory=IntMap)
    """By worker index: since when an answer to RequestSnapshotParts is waited for."""
    reported: IntMap[tuple[SnapshotPart, ...]] = field(default_factory=IntMap)
    """By worker index: the answers of workers outside the group, since the group ended."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """(generation, step) of snapshots of which a part could not be read."""
    doubtful: tuple[tuple[int, int], ...] = ()
    """The same, where a lost worker may have been the reason. A second failure makes them unreadable."""
    oldest_generation: int = 0
    """Snapshots of earlier generations may hold a wrong state and are not used."""
    discarded: Discarded | None = None
    """Snapshots of these generations are not used."""
    unreported_nodes: tuple[str, ...] = ()
    """Ids of nodes on which workers of the last group died before any worker reported the snapshots there."""
