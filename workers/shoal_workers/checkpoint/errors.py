"""Everything that can be wrong with a checkpoint, apart from the storage not answering (that is an OSError).

    CheckpointError
    +-- DamagedCheckpoint     a file is missing, short, long or altered: fall back to an older checkpoint
    +-- StateMismatch         the checkpoint is whole, but holds other tensors than the state that asks for them
    +-- StorageUnusable       the URL cannot be used for checkpoints at all: the user has to change something

Imports no torch: the service raises and catches these too. All of them survive pickling (they cross process borders).
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
    """`file` of the checkpoint in `directory` is not what was written."""

    code = "damaged_checkpoint"

    def __init__(self, directory: str, file: str, problem: str) -> None:
        super().__init__(directory, file, problem)
        self.directory = directory
        self.file = file
        self.problem = problem

    def __str__(self) -> str:
        return f"Checkpoint {self.directory} is damaged: {self.file} {self.problem}."


class StateMismatch(CheckpointError):
    """The state asks for tensors, shapes or dtypes that the checkpoint in `directory` does not hold."""

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
            "Resume with the model and optimizer that it was saved from, or start without it."
        )


class StorageUnusable(CheckpointError):
    """Checkpoints cannot be kept under `url`."""

    code = "storage_unusable"

    def __init__(self, url: str, reason: str, way_out: str) -> None:
        super().__init__(url, reason, way_out)
        self.url = url
        self.reason = reason
        self.way_out = way_out

    def __str__(self) -> str:
        return f"checkpoint.url {self.url!r} cannot be used: {self.reason}. {self.way_out}"
