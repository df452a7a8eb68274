"""Hot update of a job's code. A version is named by the SHA-256 of its archive; empty: it is not known."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity


class CodeUpdating(JobEvent):
    """Workers with the new code start beside those that train."""

    type: ClassVar[str] = "code.updating"
    severity: ClassVar[Severity] = Severity.INFO

    version: str
    before: str
    """The version that trains."""

    def words(self) -> str:
        return f"workers with code {_short(self.version)} start beside those that train with {_short(self.before)}"


class CodeUpdated(JobEvent):
    """The new code has trained its first steps, and stays. The workers with the code before end."""

    type: ClassVar[str] = "code.updated"
    severity: ClassVar[Severity] = Severity.SUCCESS

    version: str
    before: str
    step: int
    """Completed steps when it took over: the next one was the first with the new code."""
    pause_s: float | None
    """From the last step with the code before until the group with the new code had formed; null: not measured."""
    step_s: float | None
    """Median seconds of its first steps, the very first left out; null: the job ended before."""
    step_s_before: float | None
    """Median seconds of the last steps with the code before; null: there were too few."""

    def words(self) -> str:
        pause = f", after a pause of {self.pause_s:.2f} s" if self.pause_s is not None else ""
        return f"code {_short(self.version)} trains since step {self.step + 1}{pause}"


class CodeRolledBack(JobEvent):
    """The new code failed, computed a value that is not finite, or was slower: the code before trains again."""

    type: ClassVar[str] = "code.rolled_back"
    severity: ClassVar[Severity] = Severity.WARNING

    version: str
    """The one that was rolled back."""
    before: str
    step: int
    """The code before goes on from the state after this step."""
    reason: str

    def words(self) -> str:
        goes_on = f"{_short(self.before)} goes on from step {self.step}"
        return f"code {_short(self.version)} is rolled back, and {goes_on}: {self.reason}"


class CodeRefused(JobEvent):
    """The new code cannot take over. The group has trained on with its own."""

    type: ClassVar[str] = "code.refused"
    severity: ClassVar[Severity] = Severity.WARNING

    version: str
    before: str
    """The version that trains on."""
    reason: str

    def words(self) -> str:
        return f"code {_short(self.version)} is refused, and {_short(self.before)} trains on: {self.reason}"


def _short(version: str) -> str:
    return version[:12] or "the code before"
