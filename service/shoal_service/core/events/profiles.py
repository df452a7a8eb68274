"""Profiles of a running job: requested by a user, taken, failed."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import count_text, duration_text


class ProfileRequested(JobEvent):
    """A user has requested a profile of one rank."""

    type: ClassVar[str] = "profile.requested"
    severity: ClassVar[Severity] = Severity.INFO

    number: int
    rank: int
    steps: int

    def words(self) -> str:
        return f"profile {self.number} requested: rank {self.rank}, {count_text(self.steps, 'step')}"


class ProfileTaken(JobEvent):
    """A profile is complete: its table and its files can be read."""

    type: ClassVar[str] = "profile.taken"
    severity: ClassVar[Severity] = Severity.SUCCESS

    number: int
    rank: int
    first_step: int
    last_step: int
    step_s: float
    """Mean length of the profiled steps."""
    held_s: float
    """Seconds in which the worker did not train because of it."""

    def words(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}, {duration_text(self.step_s)} each"
        held = f"training was held up for {duration_text(self.held_s)}"
        return f"profile {self.number} of rank {self.rank} taken: {steps}; {held}"


class ProfileFailed(JobEvent):
    """A requested profile could not be taken; training is not touched."""

    type: ClassVar[str] = "profile.failed"
    severity: ClassVar[Severity] = Severity.WARNING

    number: int
    rank: int
    reason: str

    def words(self) -> str:
        return f"profile {self.number} of rank {self.rank} failed: {self.reason}"
