"""The resources of the REST API about the queue and about projects. Pure data, as those in `views`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shoal_service.core.scheduling.explaining import GrowthLimit
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.spec import JobSpec

_Count = Field(None, ge=0, le=10_000_000)


class QueuePlace(Frozen):
    """Where a queued job stands, as the scheduler explained it last."""

    position: int
    """Place in the order in which jobs would start; 1 is next."""
    reason: str
    """What is missing, who has it, and the way out."""
    holders: tuple[str, ...] = ()
    """Ids of jobs that hold what is waited for; at most 16."""
    expected_at: float | None = None
    """When the job is expected to start; null: not known."""
    decided_at: float
    """When the scheduler explained this."""


class StartForecast(Frozen):
    """What the scheduler would do now with a job that is not submitted."""

    workers: int | None = None
    """Workers with which the job would start now; null: it would wait."""
    position: int | None = None
    """Place in the order in which jobs would start; null: it would not wait."""
    reason: str
    holders: tuple[str, ...] = ()
    """Ids of jobs that hold what it would wait for."""
    expected_at: float | None = None
    """When it would start; null: not known."""


class PlannedSize(Frozen):
    """The layout that the job would have with this many workers."""

    workers: int
    layout: str
    num_idle: int
    """Workers that the layout does not use."""
    reason: str


class DryRun(Frozen):
    """What a submission would become. Nothing of it is stored."""

    spec: JobSpec
    """With all defaults, the user and the project of the token, and the checkpoint that the job would go on from."""
    note: str
    """What is probably not meant; the note of the job's status."""
    layouts: tuple[PlannedSize, ...]
    """Layouts with `elasticity.min_workers`, and with `elasticity.max_workers`."""
    start: StartForecast | None
    """null: this server does not schedule at the moment."""


class GrowthAnswer(Frozen):
    """Why the scheduler grants a running job fewer workers than its `elasticity.max_workers`."""

    limit: GrowthLimit
    """The limit, for programs."""
    reason: str
    """For people: what growing would bring and cost, who has the workers, and the way out."""
    max_workers: int
    decided_at: float
    """When the scheduler answered this."""


class HeldBackJob(Frozen):
    """A running job with fewer workers than it may have."""

    job_id: str
    name: str
    project: str
    user: str
    priority: int
    workers: int
    """Granted."""
    answer: GrowthAnswer


class QueuedJob(Frozen):
    """A job in the queue."""

    job_id: str
    name: str
    project: str
    user: str
    priority: int
    submitted_at: float
    place: QueuePlace | None
    """null: the scheduler has not considered the job yet."""


class ProjectRules(Frozen):
    """The quotas of a project. They count workers; those of a parent apply to all projects below it together."""

    parent: str | None = Field(None, max_length=63)
    """The project that this one is a part of; it must be defined."""
    weight: float = Field(1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Share of the cluster, relative to the projects with the same parent, while all of them have jobs."""
    guaranteed: int = Field(0, ge=0, le=10_000_000)
    """Workers that the project gets back from others as soon as it has jobs for them."""
    limit: int | None = _Count
    """The project never has more workers; null: no limit."""
    max_running: int | None = _Count
    """Largest number of jobs with workers at the same time; null: no limit."""
    max_queued: int | None = _Count
    """Largest number of queued jobs: a further one is refused at submit; null: no limit."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.limit is not None and self.guaranteed > self.limit:
            raise ValueError(
                f"guaranteed {self.guaranteed} is larger than limit {self.limit}. Set limit to at least "
                f"{self.guaranteed}, or guaranteed to at most {self.limit}."
            )
        return self


class ProjectView(ProjectRules):
    """A project: its quotas, and what it uses itself, without the projects below it."""

    name: str
    is_defined: bool
    """False: it has jobs, but no quotas of its own; the rules of the project `default` apply to them."""
    queued: int = 0
    running: int = 0
    """Jobs with workers."""
    workers: int = 0
    """Workers that are granted to its jobs."""
    share: float = 0.0
    """Its share of the workers that are granted to all jobs."""


class UserRules(Frozen):
    """How many jobs a user may have."""

    max_running: int | None = _Count
    """Largest number of jobs with workers at the same time; null: no limit."""
    max_queued: int | None = _Count
    """Largest number of queued jobs: a further one is refused at submit; null: no limit."""


class UserView(UserRules):
    """A user: the limits that apply, and what the user has."""

    name: str
    is_defined: bool
    """False: the limits are those of the user `default`; each user has them alone."""
    queued: int = 0
    running: int = 0
    """Jobs with workers."""
    workers: int = 0
    """Granted to the user's jobs."""


class QueueView(Frozen):
    """The queue in the order in which its jobs would start."""

    items: tuple[QueuedJob, ...]
    num_queued: int
    """More than there are items if `limit` cut the list off."""
    projects: tuple[ProjectView, ...]
    """The defined projects and those that have jobs."""
    held_back: tuple[HeldBackJob, ...] = ()
    """Running jobs with fewer workers than they may have, oldest first; at most `limit`."""
