"""The commit marker. A checkpoint exists as soon as this file is in its directory, not before.

    <checkpoint.url>/<job id>/step-000000000120-a1-g3/
        shard-00000.bin       tensor bytes of rank 0, concatenated
        shard-00000.json      its index: tensor, slice, offset and checksum of each item
        ...
        COMMIT.json           this marker, written last by the supervisor, which checks the generation

The name contains attempt and generation, so two generations never write into the same directory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.worker_reports import SavedFile

MARKER_NAME = "COMMIT.json"
_DIRECTORY = re.compile(r"step-(\d{12,})-a(\d+)-g(\d+)", re.ASCII)


class CommitMarker(Frozen):
    """Content of the marker: every file of the checkpoint with its length and checksum. A restore verifies them."""

    format: int = Field(1, ge=1, le=1)
    job_id: str
    attempt: int
    generation: int
    step: int
    """Optimizer steps contained in the state; also the loader's position."""
    world_size: int
    committed_at: float
    files: tuple[SavedFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Directory name of a checkpoint; sorts by step, then by attempt and generation."""

    step: int
    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}-a{self.attempt}-g{self.generation}"

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """Return the parsed name; None if it is not the name of a checkpoint's directory."""
        match = _DIRECTORY.fullmatch(name)
        parsed = CheckpointName(*(int(group) for group in match.groups())) if match else None
        # a name with more leading zeros would mean the same checkpoint
        return parsed if str(parsed) == name else None
