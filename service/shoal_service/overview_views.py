"""The documents behind the pages: everything about one job, and about all of them. Pure data, as those in `views`.

Histories are columns of equal length, because a page draws them and rows would repeat every name.
"""

from __future__ import annotations

from pydantic import Field

from shoal_service.core.goodput import Category
from shoal_service.views import (
    CheckpointView,
    ClusterSummary,
    EventView,
    Goodput,
    IncidentView,
    JobView,
    NodeView,
    WorkerView,
)
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec


class SeriesColumns(Frozen):
    """Completed steps, or means over equal numbers of steps, rounded to 6 digits. Values that are not finite are
    null."""

    step: tuple[int, ...] = ()
    at: tuple[float, ...] = ()
    loss: tuple[float | None, ...] = ()
    val_loss: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    lr: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    world_size: tuple[int, ...] = ()
    generation: tuple[int, ...] = ()
    metrics: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """The task's own metrics in training, by name; null where a step has no value."""
    val_metrics: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)


class SampleColumns(Frozen):
    """The job's accounts over time: world size wanted, granted and had, and worker-seconds by category since the
    submission."""

    at: tuple[float, ...] = ()
    step: tuple[int, ...] = ()
    state: tuple[JobState, ...] = ()
    wanted: tuple[int, ...] = ()
    """`elasticity.max_workers`."""
    granted: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    seconds: dict[Category, tuple[float, ...]] = Field(default_factory=dict)


class JobOverview(Frozen):
    """Everything that a page about one job shows, except its log."""

    job: JobView
    series: SeriesColumns
    samples: SampleColumns
    incidents: tuple[IncidentView, ...]
    """The newest 100, oldest first."""
    workers: tuple[WorkerView, ...]
    events: tuple[EventView, ...]
    """The newest 100, oldest first."""
    checkpoints: tuple[CheckpointView, ...]
    """The newest 50, oldest first."""


class SpecVersion(Frozen):
    """A version of a job's spec."""

    version: int
    accepted_at: float
    spec: JobSpec


class FleetJob(Frozen):
    """A job in the overview of all jobs."""

    id: str
    name: str
    state: JobState
    reason: str = ""
    message: str = ""
    """Why the job waits, or what it does; for people."""
    project: str = "default"
    user: str = "default"
    cluster: str = ""
    """Cluster in which its newest attempt has begun; empty: there was none."""
    priority: int = 0
    labels: dict[str, str] = Field(default_factory=dict)
    queue_position: int | None = None
    step: int = 0
    total_steps: int | None = None
    eta_s: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    workers: int = 0
    desired_workers: int = 0
    incidents: int = 0
    steps_lost: int = 0
    goodput: float | None = None
    """productive / total."""
    created_at: float
    updated_at: float
    started_at: float | None = None
    ended_at: float | None = None
    losses: tuple[float | None, ...] = ()
    """Losses over all steps, 32 at most."""
    world_sizes: tuple[int, ...] = ()
    """World sizes at the same steps as `losses`."""


class NodeJob(Frozen):
    """What one job has on a node."""

    job_id: str
    name: str
    ranks: tuple[int, ...]
    """Workers without a rank are left out."""
    num_workers: int


class FleetNode(NodeView):
    """A node, with the jobs that have workers on it."""

    jobs: tuple[NodeJob, ...] = ()


class ClusterGoodput(Frozen):
    """Worker-seconds that all jobs requested within ten minutes, and how many of them were productive."""

    at: float
    """The beginning."""
    productive: float
    total: float


class FleetOverview(Frozen):
    """A page of jobs, and what holds for all of them."""

    items: tuple[FleetJob, ...]
    total: int
    """Jobs that match; `items` is a part of them."""
    num_by_state: dict[JobState, int]
    """Number of jobs in each state, also of those that do not match."""
    goodput: tuple[ClusterGoodput, ...]
    """Goodput of the last 24 hours, oldest first."""
    goodput_now: Goodput | None
    """The sum over all jobs that are queued or hold workers."""
    nodes: tuple[FleetNode, ...]
    clusters: tuple[ClusterSummary, ...] = ()
    """The service's own first."""
    connected: bool
    """Whether the service is connected to at least one cluster."""
    exposure: str = ""
    """What the code of jobs can read of the service, in words; empty: it runs as another user, or on other machines."""


class SweepSummary(Frozen):
    """An entry of the list of sweeps."""

    name: str
    project: str
    num_jobs: int
    num_by_state: dict[JobState, int]
    created_at: float
    """When the sweep's first job was created."""


class SweepView(SweepSummary):
    """A sweep: the jobs of a project with the same label `sweep`."""

    limit: int | None
    """`sweep.limit` of the newest job, as the next two."""
    prune: str | None
    warmup_steps: int | None
    jobs: tuple[FleetJob, ...]
    """The best first: by validation loss, then by loss. In the answer to a submission: the jobs of the request, in the
    order of the grid. At most 1,000."""
