"""Which durable checkpoints exist, and which are being written. Named by their directory."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_service.core.attempt.state.persistent.int_map import IntMap
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    newest: str | None = None
    """The newest committed one."""
    origin: str | None = None
    """The one of another job that the job goes on from while it has none of its own."""
    damaged: tuple[str, ...] = ()
    parts: dict[str, IntMap[SavedPart]] = field(default_factory=dict)
    """By name, then rank: parts that wait for the others, then for their commit."""
    committing: tuple[str, ...] = ()
    """Their commit is in flight."""
    failed: tuple[str, ...] = ()
    """Checkpoints of this attempt that will never be committed."""
    clean_step: int | None = None
    """Completed steps of the newest state that every rank was found to hold alike; None: no group was formed yet."""
    verified_step: int | None = None
    """The same, if it follows from a comparison and not from how the group started."""
    unverified: tuple[str, ...] = ()
    """Committed ones of later steps."""
    distrusted: tuple[int, int] | None = None
    """(generation, step): checkpoints of this generation or an earlier one, and of later steps, are not read."""
    must_search: bool = False
    """The newest one is not trusted any more: the storage is asked for an older one before the next group forms."""

    def is_distrusted(self, name: str) -> bool:
        parsed = CheckpointName.parse(name)
        if parsed is None or self.distrusted is None:
            return False
        generation, step = self.distrusted
        return parsed.generation <= generation and parsed.step > step

    @property
    def trusts_seed_only(self) -> bool:
        """The state was found wrong before the first comparison that was clean."""
        return self.distrusted is not None and self.distrusted[1] == 0

    @property
    def durable_step(self) -> int:
        """Step of the checkpoint that would be restored; 0: there is none."""
        newest = CheckpointName.parse(self.newest or self.origin or "")
        return newest.step if newest else 0
