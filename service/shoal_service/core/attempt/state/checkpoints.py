"""Which durable checkpoints exist, and which are being written. Named by their directory."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    newest: str | None = None
    """The newest committed one."""
    damaged: tuple[str, ...] = ()
    parts: dict[str, dict[int, SavedPart]] = field(default_factory=dict)
    """By name, then rank: parts that wait for the others, then for their commit."""
    committing: tuple[str, ...] = ()
    """Their commit is in flight."""
    failed: tuple[str, ...] = ()
    """Checkpoints of this attempt that will never be committed."""

    @property
    def durable_step(self) -> int:
        """Step of the newest committed checkpoint; 0: there is none."""
        newest = CheckpointName.parse(self.newest) if self.newest else None
        return newest.step if newest else 0
