"""Profiles of a running job: the request, the seconds of each step by category, the report, and where its files lie.

control plane --- Directive.profile ---> supervisor --- profile(generation, request) ---> worker
control plane <-- SupervisorReports ---- supervisor <-- Profiled ------------------------ worker

The engine takes profiles, the service passes requests on and keeps the results. Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen

MAX_STEPS = 20
"""Largest number of steps of one profile: a trace grows by megabytes per step."""
MAX_FILE_BYTES = 64 << 20
"""Largest size of one compressed file, bytes; a larger one is not kept."""
KEPT_PROFILES = 8
"""Number of profiles that a job keeps; older ones are deleted."""
TRACE_FILE = re.compile(r"^(trace|memory)-rank[0-9]{1,8}-g[0-9]{1,18}\.json\.gz$")
"""Names of a profile's files."""


class ProfileRequest(Frozen):
    """Request to profile one rank for some steps."""

    number: int = Field(ge=1)
    """Number among the job's profiles, from 1."""
    rank: int = Field(ge=0)
    steps: int = Field(ge=1, le=MAX_STEPS)
    max_file_bytes: int = MAX_FILE_BYTES
    requested_at: float = 0.0
    """Wall-clock time, seconds since the epoch."""


class Category(StrEnum):
    """Where the time of a step goes, as the training thread of one rank sees it."""

    COMPUTE = "compute"
    """Forward and backward passes."""
    COMMUNICATION = "communication"
    """Waiting for collectives, messages of a pipeline and the vote: what computing does not hide."""
    DATA = "data"
    """Making batches."""
    OPTIMIZER = "optimizer"
    """Clipping, the update, and the report of the step."""
    SNAPSHOT = "snapshot"
    """Copying the state in memory."""
    CHECKPOINT = "checkpoint"
    """Staging a durable checkpoint."""
    VALIDATION = "validation"
    OTHER = "other"


class StepTimes(Frozen):
    """One profiled step; the categories add up to its length."""

    step: int
    """Its number: completed steps after it."""
    seconds: dict[Category, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class ProfileFile(Frozen):
    """A gzip file of JSON in the directory of the profile."""

    name: str = Field(pattern=TRACE_FILE.pattern)
    bytes: int = Field(ge=0)


class Overlap(Frozen):
    """The collectives of one axis in the profiled steps."""

    axis: str = Field(max_length=64)
    """`shards` and `dp_replicate` for gradients and parameters, `tp`, `cp`, `ep`, `pp`; `all ranks`: an axis that
    all ranks share and, on a CPU, the vote."""
    seconds: float = Field(ge=0)
    """While one of them was under way."""
    hidden: float = Field(ge=0, le=1)
    """Share of these seconds in which the rank also computed."""


class Profiled(Frozen):
    """A worker has ended a profile. `error` says why there is none; empty: there is one."""

    generation: int
    number: int
    rank: int
    times: tuple[StepTimes, ...] = Field(default=(), max_length=MAX_STEPS)
    files: tuple[ProfileFile, ...] = Field(default=(), max_length=2)
    peak_bytes: int | None = None
    """Most memory that tensors took: on a GPU in all, on a CPU beyond what they took when the profile began."""
    overlaps: tuple[Overlap, ...] = Field(default=(), max_length=32)
    held_s: float = 0.0
    """Seconds for which the start and the end of the profile kept the training thread from training."""
    note: str = Field(default="", max_length=500)
    """Why a file is missing, or why there are fewer steps than requested."""
    error: str = Field(default="", max_length=2000)


OF_AXIS = "shoal collective of "
"""Begins the event of a collective in a trace; the description of its group and the collective's name follow."""
WAITING = "shoal wait"
"""The event of a wait for a collective."""
FOLDER = "profiles"
"""Folder of the profiles, beside the checkpoints of the job."""
_PREFIX = "profile-"


def name_of(number: int) -> str:
    """Name of the directory of a profile."""
    return f"{_PREFIX}{number:06d}"


def to_delete(names: Iterable[str], newest: int) -> list[str]:
    """Return the directories of profiles that are too old once profile `newest` is kept. Other names are left alone."""
    numbers = {name: int(name.removeprefix(_PREFIX)) for name in names if _is_profile(name)}
    return sorted(name for name, number in numbers.items() if number <= newest - KEPT_PROFILES)


def _is_profile(name: str) -> bool:
    digits = name.removeprefix(_PREFIX)
    return name.startswith(_PREFIX) and digits.isascii() and digits.isdigit()
