"""Which version of its code the attempt trains with, and the update that is under way.

A version is named by the SHA-256 of its archive; empty: the job has no code of its own, or the journal of an older
release did not name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_workers.contract.course.best import Standing


class UpdatePhase(StrEnum):
    WARMING = "warming"
    """Workers with the new code start beside those that train."""
    TRIAL = "trial"
    """The new code trains; the workers with the code before are kept, and wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeUpdate:
    version: str
    """The new one."""
    since: float
    phase: UpdatePhase = UpdatePhase.WARMING
    comparing: bool = False
    """The answer to CompareModels is waited for."""
    is_same_model: bool = False
    """A worker with the new code has built the model: its parameters are those of the model that trains."""
    before: str = ""
    """TRIAL: the version before."""
    trial_since: float = 0.0
    generation: int = 0
    """TRIAL: the first generation with the new code."""
    step: int = 0
    """TRIAL: completed steps when it began."""
    standing: Standing | None = None
    """TRIAL: what the validations had shown by then."""
    paused_at: float = 0.0
    """TRIAL: when the last step of the code before was reported."""
    pause_s: float | None = None
    """TRIAL: from then until the group with the new code had formed."""
    median_before_s: float | None = None
    """TRIAL: median step with the code before; None: too few steps were measured."""
    step_times: tuple[float, ...] = ()
    """TRIAL: seconds of the steps with the new code, without the first one of each generation."""
    fault: str = ""
    """TRIAL: why the code before takes over at the next step boundary."""
    keeps_steps: bool = True
    """With the `fault`: the steps of the new code are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    current: str = ""
    """Groups form of workers with this version."""
    wanted: str | None = None
    """By the last directive; None: it has not changed since the attempt began."""
    refused: str = ""
    """A version that was refused or rolled back; it is not tried again until another one is wanted."""
    update: CodeUpdate | None = None

    @property
    def warming(self) -> CodeUpdate | None:
        return self.update if self.update is not None and self.update.phase is UpdatePhase.WARMING else None

    @property
    def trial(self) -> CodeUpdate | None:
        return self.update if self.update is not None and self.update.phase is UpdatePhase.TRIAL else None


def short(version: str) -> str:
    """For people."""
    return version[:12] or "none"
