"""Errors of checkpoints. A storage that does not answer is an OSError instead.

    CheckpointError
    +-- DamagedCheckpoint     a file is missing, short, long or altered: fall back to an older checkpoint
    +-- StateMismatch         the checkpoint is intact, but its tensors do not fit the state to load
    +-- CommitConflict        another supervisor has committed this checkpoint with other files
    +-- AttemptFollowed       a later attempt of the job has begun, so this one commits nothing
    +-- InitialWeightsUnusable    `init_from` cannot be read, or does not fit the model
    +-- StorageUnusable       the URL cannot be used for checkpoints: the user must change the configuration

Imports no torch, since the service uses these errors too. They survive pickling, since they cross process boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_SHOWN = 5


@dataclass(eq=False)
class CheckpointError(Exception):
    """Root of this tree. `code` is stable; the message is for people, made of the fields."""

    code = "checkpoint_error"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(eq=False)
class DamagedCheckpoint(CheckpointError):
    """`file` of the checkpoint in `directory` differs from what was written."""

    code = "damaged_checkpoint"
    directory: str
    file: str
    problem: str

    def __str__(self) -> str:
        return f"Checkpoint {self.directory} is damaged: {self.file} {self.problem}."


@dataclass(eq=False)
class StateMismatch(CheckpointError):
    """The state has tensors, shapes or dtypes that the checkpoint in `directory` does not contain."""

    code = "state_mismatch"
    directory: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.problems[:_SHOWN])
        more = f"; and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        return (
            f"Checkpoint {self.directory} does not fit this model and optimizer: {shown}{more}. "
            "Resume with the model and optimizer that it was saved from, or start a job without this checkpoint."
        )


@dataclass(eq=False)
class InitialWeightsUnusable(CheckpointError):
    """The weights at `url` cannot begin this job."""

    code = "initial_weights_unusable"
    url: str
    problem: str

    def __str__(self) -> str:
        return (
            f"init_from {self.url!r} cannot be used: {self.problem}. Name a safetensors file of the same model, or a "
            "directory with one, that every node can reach."
        )


@dataclass(eq=False)
class CommitConflict(CheckpointError):
    """The checkpoint in `directory` has a commit marker with other files."""

    code = "commit_conflict"
    directory: str

    def __str__(self) -> str:
        return f"Checkpoint {self.directory} is committed already, with other files. The first commit stays."


@dataclass(eq=False)
class AttemptFollowed(CheckpointError):
    """Attempt `attempt` may not commit in `directory`, since the attempt `later` has begun."""

    code = "attempt_followed"
    directory: str
    attempt: int
    later: int

    def __str__(self) -> str:
        return (
            f"Checkpoint {self.directory} is not committed: attempt {self.later} of the job has begun, so attempt "
            f"{self.attempt} is over."
        )


@dataclass(eq=False)
class StorageUnusable(CheckpointError):
    """Checkpoints cannot be stored under `url`. `is_final`: trying again does not help."""

    code = "storage_unusable"
    url: str
    reason: str
    way_out: str
    is_final: bool = True

    def __str__(self) -> str:
        return f"checkpoint.url {self.url!r} cannot be used: {self.reason}. {self.way_out}"
