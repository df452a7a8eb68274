"""The resources of the REST API about profiles of running jobs. Pure data, as those in `views`."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.profiles import MAX_STEPS, Category, ProfileFile, StepTimes


class ProfileState(StrEnum):
    REQUESTED = "requested"
    """The worker profiles from its next step boundary, or no group trains at the moment."""
    DONE = "done"
    FAILED = "failed"


class ProfileBody(Frozen):
    """A request to profile one rank of a running job."""

    steps: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Steps to profile."""
    rank: int = Field(default=0, ge=0, le=10_000_000)


class ProfileView(Frozen):
    """One profile of a job: requested, done, or failed with a reason."""

    number: int
    """Number among the job's profiles, from 1. The newest 8 are kept."""
    state: ProfileState
    rank: int
    steps: int
    """Requested steps."""
    requested_at: float
    ended_at: float | None = None
    attempt: int
    generation: int | None = None
    """Generation in which it was taken; null: not yet, or in none."""
    reason: str = ""
    """Why it failed."""
    note: str = ""
    """Why a file is missing, or why there are fewer steps than requested."""
    times: tuple[StepTimes, ...] = ()
    """Where the time of each profiled step went; the categories add up to its length."""
    files: tuple[ProfileFile, ...] = ()
    """The trace in Chrome's format, for chrome://tracing or ui.perfetto.dev, and the timeline of memory."""
    peak_bytes: int | None = None
    """Most memory that tensors took: on a GPU in all, on a CPU beyond what they took when the profile began."""
    held_s: float = 0.0
    """For this long the start and the end of the profile kept the worker from training, seconds."""

    @property
    def step_s(self) -> float:
        """Mean length of a profiled step, seconds; 0: there is none."""
        return sum(one.total_s for one in self.times) / max(1, len(self.times))

    def mean_s(self, category: Category) -> float:
        """Mean seconds of a profiled step in one category."""
        return sum(one.seconds.get(category, 0.0) for one in self.times) / max(1, len(self.times))
