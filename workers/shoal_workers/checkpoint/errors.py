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

from dataclasses import dataclass

from shoal_workers.contract.base import FieldError

_SHOWN = 5


@dataclass(eq=False)
class CheckpointError(FieldError):
    """Root of this tree. `code` is stable; the message is for people, made of the fields."""

    code = "checkpoint_error"


@dataclass(eq=False)
class DamagedCheckpoint(CheckpointError, text="Checkpoint {directory} is damaged: {file} {problem}."):
    """`file` of the checkpoint in `directory` differs from what was written."""

    code = "damaged_checkpoint"
    directory: str
    file: str
    problem: str


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
class InitialWeightsUnusable(
    CheckpointError,
    text=(
        "init_from {url!r} cannot be used: {problem}. Name a safetensors file of the same model, or a directory "
        "with one, that every node can reach."
    ),
):
    """The weights at `url` cannot begin this job."""

    code = "initial_weights_unusable"
    url: str
    problem: str


@dataclass(eq=False)
class CommitConflict(
    CheckpointError, text="Checkpoint {directory} is committed already, with other files. The first commit stays."
):
    """The checkpoint in `directory` has a commit marker with other files."""

    code = "commit_conflict"
    directory: str


@dataclass(eq=False)
class AttemptFollowed(
    CheckpointError,
    text=(
        "Checkpoint {directory} is not committed: attempt {later} of the job has begun, so attempt {attempt} is over."
    ),
):
    """Attempt `attempt` may not commit in `directory`, since the attempt `later` has begun."""

    code = "attempt_followed"
    directory: str
    attempt: int
    later: int


@dataclass(eq=False)
class StorageUnusable(CheckpointError, text="checkpoint.url {url!r} cannot be used: {reason}. {way_out}"):
    """Checkpoints cannot be stored under `url`. `is_final`: trying again does not help."""

    code = "storage_unusable"
    url: str
    reason: str
    way_out: str
    is_final: bool = True
