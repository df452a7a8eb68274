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

from collections.abc import Sequence
from typing import Any

_SHOWN = 5


class CheckpointError(Exception):
    """Root of this tree. `code` is stable; the message is for people."""

    code = "checkpoint_error"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class DamagedCheckpoint(CheckpointError):
    """`file` of the checkpoint in `directory` differs from what was written."""

    code = "damaged_checkpoint"

    def __init__(self, directory: str, file: str, problem: str) -> None:
        super().__init__(directory, file, problem)
        self.directory = directory
        self.file = file
        self.problem = problem

    def __str__(self) -> str:
        return f"Checkpoint {self.directory} is damaged: {self.file} {self.problem}."


class StateMismatch(CheckpointError):
    """The state has tensors, shapes or dtypes that the checkpoint in `directory` does not contain."""

    code = "state_mismatch"

    def __init__(self, directory: str, problems: Sequence[str]) -> None:
        super().__init__(directory, tuple(problems))
        self.directory = directory
        self.problems = tuple(problems)

    def __str__(self) -> str:
        shown = "; ".join(self.problems[:_SHOWN])
        more = f"; and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        return (
            f"Checkpoint {self.directory} does not fit this model and optimizer: {shown}{more}. "
            "Resume with the model and optimizer that it was saved from, or start a job without this checkpoint."
        )


class InitialWeightsUnusable(CheckpointError):
    """The weights at `url` cannot begin this job."""

    code = "initial_weights_unusable"

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"init_from {self.url!r} cannot be used: {self.problem}. Name a safetensors file of the same model, or a "
            "directory with one, that every node can reach."
        )


class CommitConflict(CheckpointError):
    """The checkpoint in `directory` has a commit marker with other files."""

    code = "commit_conflict"

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.directory = directory

    def __str__(self) -> str:
        return f"Checkpoint {self.directory} is committed already, with other files. The first commit stays."


class AttemptFollowed(CheckpointError):
    """Attempt `attempt` may not commit in `directory`, since the attempt `later` has begun."""

    code = "attempt_followed"

    def __init__(self, directory: str, attempt: int, later: int) -> None:
        super().__init__(directory, attempt, later)
        self.directory = directory
        self.attempt = attempt
        self.later = later

    def __str__(self) -> str:
        return (
            f"Checkpoint {self.directory} is not committed: attempt {self.later} of the job has begun, so attempt "
            f"{self.attempt} is over."
        )


class StorageUnusable(CheckpointError):
    """Checkpoints cannot be stored under `url`. `is_final`: trying again does not help."""

    code = "storage_unusable"

    def __init__(self, url: str, reason: str, way_out: str, is_final: bool = True) -> None:
        super().__init__(url, reason, way_out, is_final)
        self.url = url
        self.reason = reason
        self.way_out = way_out
        self.is_final = is_final

    def __str__(self) -> str:
        return f"checkpoint.url {self.url!r} cannot be used: {self.reason}. {self.way_out}"
