"""The key `continue_from` of a spec: the checkpoint of another job from which a job goes on."""

from __future__ import annotations

from pydantic import Field, model_validator

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.marker import CheckpointName


class ContinueFrom(Frozen):
    """A job that goes on from another one's checkpoint: model, optimizer, step and position in the data. Its own
    checkpoints go to its own directory; those of the other job are only read."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """The id of the other job, in any state."""
    step: int | None = Field(None, ge=1, le=2**53)
    """Completed steps of the checkpoint; null: the newest one when the job is submitted."""
    checkpoint: str | None = Field(None, max_length=100)
    """The name of the checkpoint's directory. The service sets it."""
    url: str | None = Field(None, max_length=8192)
    """Where it is. The service sets it."""

    @model_validator(mode="after")
    def _is_a_name(self) -> ContinueFrom:
        if self.checkpoint is not None and CheckpointName.parse(self.checkpoint) is None:
            raise ValueError(
                f"continue_from.checkpoint {self.checkpoint!r} is not the name of a checkpoint. Leave it out: the "
                "service sets it."
            )
        return self

    @property
    def name(self) -> CheckpointName | None:
        """None: the service has not set it, because there is no service (torchrun)."""
        return None if self.checkpoint is None else CheckpointName.parse(self.checkpoint)
