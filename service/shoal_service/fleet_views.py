"""The resources of the REST API about what all jobs share: nodes, clusters, the queue, projects, sweeps and retention.

Nodes and clusters come with drains, cordons and notices. Pure data, as in `views`: no method here
reads or decides anything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.islands import Contribution
from shoal_service.core.nodes import Cordon, Drain, Node
from shoal_service.core.retention import Kind
from shoal_service.core.worker_changes import ChangeKind
from shoal_service.views import (
    GrowthAnswer,
    ListedJob,
    QueuePlace,
)
from shoal_workers.contract import Frozen, IncidentCause, JobSpec, JobState, Moment
from shoal_workers.contract.islands import RoundDecision


class DrainView(Drain):
    """A drain of a node, as the API shows it."""


class DrainRequest(Frozen):
    """The request to drain a node."""

    reason: str = Field("drain requested", min_length=1, max_length=500)
    """For people; shown with the node and in the histories of the jobs that leave it."""
    deadline_s: float | None = Field(None, ge=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds until the node goes away; null: it stays, but nothing may run on it."""


class NodeView(Node):
    """A node of the cluster, as the API shows it."""

    drain: DrainView | None = None
    num_workers: int = 0
    """Workers of all jobs on it now. A drained node is drained once there is none, and draining before."""
    cpus_of_others: float = 0.0
    """Reserved by others than Shoal's jobs on a shared Ray cluster; the scheduler leaves them out."""
    gpus_of_others: float = 0.0

    @classmethod
    def of(cls, node: Node, **changes: float) -> NodeView:
        return cls.model_validate({**node.model_dump(), **changes})


class IslandArrival(Contribution):
    """The difference of an island, whole in the storage."""

    arrived_at: float


class IslandRound(Frozen):
    """A round in which islands merge, see docs/islands.md."""

    round: int
    """From 0."""
    arrived: tuple[IslandArrival, ...]
    decision: RoundDecision | None
    """The members and their weights; null: the round is open."""
    closed_at: float | None
    loss: float | None
    """Mean of the members' losses, weighted by tokens; null: the round is open, or a member has none."""


class ClusterSummary(Frozen):
    """One of the Ray clusters that have joined."""

    name: str
    address: str = ""
    connected: bool = False
    """Its gateway reports, and Ray answers it."""
    why_away: str = ""
    """Why it is not connected, for people; empty: it is."""
    silent_s: float | None = None
    """Seconds since its gateway's newest report; null: none has come."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Added to those of its nodes; a node's own take precedence."""
    cordon: Cordon | None = None
    """No worker is added on its nodes; those that are there stay."""
    num_nodes: int = 0
    """Nodes that are alive. This and the numbers below are those of the newest snapshot."""
    cpus_total: float = 0.0
    cpus_free: float = 0.0
    gpus_total: float = 0.0
    gpus_free: float = 0.0
    num_jobs: int = 0
    """Jobs with an attempt there."""


class ClusterView(Frozen):
    """The clusters as the scheduler sees them."""

    connected: bool
    """True if at least one of them is connected."""
    address: str
    """Address of the first cluster."""
    clusters: tuple[ClusterSummary, ...] = ()
    """By name; the service's own first."""
    nodes: tuple[NodeView, ...]
    cpus_total: float
    cpus_free: float
    gpus_total: float
    gpus_free: float
    owner: str
    """Name of the control plane that holds the lease."""
    epoch: int


class CordonRequest(Frozen):
    """The request to place no new worker on a node."""

    reason: str = Field("cordon requested", min_length=1, max_length=500)
    """Why, for people; shown with the node."""


class ClusterPatch(Frozen):
    """Changes of a cluster."""

    labels: dict[str, str | None] = Field(max_length=64)
    """Merged by name; null removes one. They are added to those of its nodes, and the rules for names and values are
    those of `worker.selector`."""


class NoticeRequest(Frozen):
    """The cloud's notice that it will take a node away."""

    deadline_s: float = Field(30.0, ge=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds until then. Google Cloud and Azure give 30, AWS gives 120."""
    deadline_at: Moment | None = None
    """The same as a time, which has precedence: seconds since 1970, or ISO 8601 with a zone, as AWS writes it."""
    reason: str = Field("preemption notice", min_length=1, max_length=500)
    """For people; shown with the node and in the histories of the jobs that leave it."""


_Count = Field(None, ge=0, le=10_000_000)


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


class JobOwner(Frozen):
    """A job, and whose it is."""

    job_id: str
    name: str
    project: str
    user: str


class HeldBackJob(JobOwner):
    """A running job with fewer workers than it may have."""

    priority: int
    workers: int
    """Granted."""
    answer: GrowthAnswer


class QueuedJob(JobOwner):
    """A job in the queue."""

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


class QuotaUse(Frozen):
    """What the jobs of a project or a user take."""

    name: str
    is_defined: bool
    """False: it has jobs, but no rules of its own; those of `default` apply."""
    queued: int = 0
    running: int = 0
    """Jobs with workers."""
    workers: int = 0
    """Workers that are granted to its jobs."""


class ProjectView(ProjectRules, QuotaUse):
    """A project: its quotas, and what it uses itself, without the projects below it."""

    share: float = 0.0
    """Its share of the workers that are granted to all jobs."""


class UserRules(Frozen):
    """How many jobs a user may have."""

    max_running: int | None = _Count
    """Largest number of jobs with workers at the same time; null: no limit."""
    max_queued: int | None = _Count
    """Largest number of queued jobs: a further one is refused at submit; null: no limit."""


class UserView(UserRules, QuotaUse):
    """A user: the limits that apply, and what the user has. Each user has the limits of `default` alone."""


class QueueView(Frozen):
    """The queue in the order in which its jobs would start."""

    items: tuple[QueuedJob, ...]
    num_queued: int
    """More than there are items if `limit` cut the list off."""
    projects: tuple[ProjectView, ...]
    """The defined projects and those that have jobs."""
    held_back: tuple[HeldBackJob, ...] = ()
    """Running jobs with fewer workers than they may have, oldest first; at most `limit`."""


class FleetJob(ListedJob):
    """A job in the overview of all jobs."""

    message: str = ""
    """Why the job waits, or what it does; for people."""
    labels: dict[str, str] = Field(default_factory=dict)
    val_loss: float | None = None
    steps_lost: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    losses: tuple[float | None, ...] = ()
    """Losses over all steps, 32 at most."""
    world_sizes: tuple[int, ...] = ()
    """World sizes at the same steps as `losses`."""


class JobField(Frozen):
    """A name that conditions, orders and columns of the table of jobs can use."""

    name: str
    kind: str
    """What it is compared with: text, state, number, time, switch, label or any."""
    meaning: str = ""


class JobFields(Frozen):
    """The names that jobs have: of facts and settings, and those of labels and metrics that users have chosen."""

    items: tuple[JobField, ...]


class PanelKind(StrEnum):
    """What a panel of a workspace shows."""

    LINES = "lines"
    """A metric of each job over steps, time, tokens, samples or another metric."""
    SCATTER = "scatter"
    """A point for each job, at two of its values."""
    BARS = "bars"
    """A bar for each job, or the mean of each group."""


class Band(StrEnum):
    """What surrounds the mean of the jobs of a group, or their median."""

    MIN_MAX = "min_max"
    """From the smallest to the largest value."""
    STD = "std"
    """The standard deviation of the sample, above and below the mean; zero for one job."""
    STD_ERROR = "std_error"
    """The standard deviation, divided by the square root of the number of jobs."""
    MEDIAN = "median"
    """The median instead of the mean, and the quartiles around it."""
    NONE = "none"


class Panel(Frozen):
    """A panel of a workspace."""

    kind: PanelKind = PanelKind.LINES
    y: str = Field(max_length=200)
    """Lines: a metric, as `GET /v1/curves` names it. Otherwise a name as in `columns` of `GET /v1/jobs`."""
    x: str = Field("", max_length=200)
    """Scatter: a name as in `columns`."""
    log_y: bool = False
    no_outliers: bool = False
    """Lines: the axis spans the middle 98 % of the values."""
    width: int = Field(1, ge=1, le=4)
    """Columns of the grid."""
    height: int = Field(1, ge=1, le=3)
    """Rows of the grid."""


class Workspace(Frozen):
    """How a view is shown as a workspace: its panels in their order, and which jobs stand out."""

    panels: tuple[Panel, ...] = Field((), max_length=64)
    axis: str = Field("step", min_length=1, max_length=200)
    """step, time, tokens, samples, or a metric, as `GET /v1/curves` names it."""
    smoothing: float = Field(0.0, ge=0, le=0.99)
    """Weight of the moving average before each point."""
    log_x: bool = False
    group: str = Field("", max_length=200)
    """Jobs with the same value of this name, as in `columns`, are one group; empty: no groups."""
    band: Band = Band.MIN_MAX
    """Drawn around the mean of each group."""
    project: str = Field("", max_length=200)
    """Only jobs of this project; empty: of all that the reader sees."""
    limit: int = Field(200, ge=1, le=500)
    """Jobs that are shown, at most."""
    hidden: tuple[Annotated[str, Field(max_length=64)], ...] = Field((), max_length=500)
    """Ids of the jobs, or values of the groups, that are not drawn."""
    colours: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(pattern=r"^#[0-9a-f]{6}$")]] = Field(
        default_factory=dict, max_length=500
    )
    """Chosen colours, by id of the job or value of the group."""
    zoom: tuple[float, float] | None = None
    """The part of the axis that all panels show; null: all."""


class TableView(Frozen):
    """What a table of jobs shows. The texts are those of the parameters of `GET /v1/jobs`; empty: as without it."""

    where: str = Field("", max_length=2000)
    sort: str = Field("", max_length=500)
    columns: str = Field("", max_length=4000)
    search: str = Field("", max_length=200)
    state: str = Field("", max_length=200)
    label: str = Field("", max_length=400)
    cluster: str = Field("", max_length=63)
    archived: bool = False
    workspace: Workspace | None = None
    """Null: the view was never saved as a workspace."""


class Curve(Frozen):
    """Columns of equal length. In the packed form each is a text: base64 of little-endian numbers."""

    step: tuple[int, ...] | str
    """The last step of each point. Packed: float64."""
    at: tuple[float, ...] | str
    """Seconds since the epoch. Packed: float64."""
    values: dict[str, tuple[float | None, ...] | str]
    """By metric; null: not reported, or not finite. Packed: float32, NaN for null. A metric that no point has is left
    out."""


class JobCurves(FleetJob):
    """A job with its curves."""

    tokens_per_step: float | None = None
    """Null: it has no step yet, or reports no tokens."""
    samples_per_step: float | None = None
    curve: Curve


class Curves(Frozen):
    """Curves of many jobs."""

    items: tuple[JobCurves, ...]
    """In a stream: the jobs that have changed."""
    ids: tuple[str, ...]
    """All jobs that match, in their order, up to `limit`."""
    total: int
    """Jobs that match."""
    position: str = ""
    """For the parameter `since` of the stream; empty in the stream itself."""


class SavedView(Frozen):
    """A table of jobs, or a workspace, that was saved under a name, for all who see the project."""

    project: str
    name: str
    view: TableView
    saved_at: float
    saved_by: str
    """Name of the one who saved it."""


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
    """True if the service is connected to at least one cluster."""
    exposure: str = ""
    """What the code of jobs can read of the service, in words; empty: it runs as another user, or on other machines."""


class TimelineJob(Frozen):
    """A job in the fleet's timeline: columns of equal length, one entry for each change."""

    id: str
    name: str
    project: str
    user: str
    state: JobState
    """Now."""
    at: tuple[float, ...]
    workers: tuple[int, ...]
    """Workers that the job had from then on."""
    granted: tuple[int, ...]
    """Workers that the scheduler granted."""
    states: tuple[JobState, ...]


class WorkerFlow(Frozen):
    """Workers that one job gives and another one gets."""

    job: str
    """The other job."""
    name: str
    """Its name, or its id if it is not in the answer."""
    workers: int


class TimelineChange(Frozen):
    """A change of a job's workers."""

    at: float
    job: str
    name: str
    project: str
    kind: ChangeKind
    before: int
    """Workers that the job was granted before; after an incident, workers of its group."""
    after: int
    others: tuple[WorkerFlow, ...] = ()
    """The jobs that give the workers, or get them, by the same decision of the scheduler."""
    free: int = 0
    """Workers of this change that no job gives or gets: they were free, or become free."""
    freed_by: tuple[WorkerFlow, ...] = ()
    """Jobs that had left workers less than a minute before, and how many of them this one got. They are part of
    `free`; where the rest came from is not known."""
    taken_by: tuple[WorkerFlow, ...] = ()
    """Jobs that got workers less than a minute after this one had left them. They are part of `free`."""
    reason: str
    """Why, in the words of the scheduler, of the end of the attempt, or of the incident."""
    words: str


class ProjectGoodput(Frozen):
    """Worker-seconds of the jobs of a project in the window."""

    project: str
    seconds: dict[Category, float]
    recovering: dict[IncidentCause, float] = Field(default_factory=dict)
    """The category `recovering`, by incident cause, as far as the samples have it."""
    total: float
    by_interval: dict[Category, tuple[float, ...]] = Field(default_factory=dict)
    """Worker-seconds in each of the intervals between `edges`."""


class FleetTimeline(Frozen):
    """Which job had how many workers when, and why."""

    since: float
    until: float
    jobs: tuple[TimelineJob, ...]
    """The newest first: at most the 100 newest that had an attempt and had not ended before `since`."""
    num_left_out: int
    """1: there are older ones."""
    decisions: tuple[TimelineChange, ...]
    """The newest first, at most 500, of these jobs."""
    edges: tuple[float, ...] = ()
    """The edges of the intervals of `by_interval`, in rising order."""
    projects: tuple[ProjectGoodput, ...]
    """By name. They count the 300 newest jobs that had an attempt and had not ended before `since`."""


class ProjectUsage(Frozen):
    """What the jobs of a project have used in a period. Deleted jobs are not counted."""

    project: str
    since: float
    until: float
    worker_s: float
    """Worker-seconds, without those in the queue and those of requested workers that the jobs did not have."""
    productive_s: float
    """The part of them in steps that were completed for the first time."""
    num_jobs: int
    """Jobs that had workers."""


class SweepResult(Frozen):
    """The best job of a sweep so far."""

    job: str
    name: str
    measure: Literal["val_loss", "loss"]
    """What `value` is: the validation loss if the job has one, otherwise the loss."""
    value: float


class SweepSummary(Frozen):
    """An entry of the list of sweeps."""

    name: str
    project: str
    num_jobs: int
    num_by_state: dict[JobState, int]
    created_at: float
    """When the sweep's first job was created."""
    ended_at: float | None = None
    """When its last job ended; null: one has not ended."""
    best: SweepResult | None = None
    """The first of `jobs` in the sweep's own view; null: no job has a loss."""


class SweepView(SweepSummary):
    """A sweep: the jobs of a project with the same label `sweep`."""

    limit: int | None
    """`sweep.limit` of the newest job, as the next two."""
    prune: str | None
    warmup_steps: int | None
    reduction: int | None = None
    """`sweep.reduction`; null: the sweep is not pruned by halving."""
    jobs: tuple[FleetJob, ...]
    """The best first: by validation loss, then by loss. In the answer to a submission: the jobs of the request, in the
    order of the grid. At most 1,000."""


class SweepCurve(Frozen):
    """The curve of one job of a sweep, as columns of equal length. Steps without a value are left out."""

    id: str
    step: tuple[int, ...]
    at: tuple[float, ...]
    value: tuple[float, ...]


class SweepBest(Frozen):
    """The job `job` was better than every job of the sweep before."""

    at: float
    value: float
    job: str


class SweepCurves(Frozen):
    """The losses of all jobs of a sweep, and what follows from them."""

    measure: str
    """loss or val_loss."""
    steps_per_point: int
    """A point is the mean of so many steps."""
    jobs: tuple[SweepCurve, ...]
    """The oldest first; at most the 500 newest."""
    best: tuple[SweepBest, ...]
    """The best value so far, by time."""


class DeletionView(JobOwner):
    """The deletion of a job; it stays when the job is gone, as a record of it."""

    requested_at: float
    requested_by: str = ""
    """Who asked for it; empty: not known."""
    reason: str = ""
    """Why, if retention deletes the job."""
    with_checkpoints: bool = True
    """Its files in the storage are deleted too."""
    with_files: bool = False
    """They are a script's own, so the whole directory is deleted."""
    root: str = ""
    """The job's directory in the storage; empty: it is not known."""
    kept: tuple[str, ...] = ()
    """URLs of checkpoints that stay in the storage, because they are pinned or another job needs them; or that of a
    script's directory."""
    rows: int = 0
    """Deleted from the database so far: events, lines of the log, points of the series."""
    finished_at: float | None = None
    """null: it is not complete, and is continued."""
    error: str = ""
    """Why the last try to continue it failed."""


class RemovalView(Frozen):
    """One thing that retention deletes."""

    kind: Kind
    job_id: str = ""
    name: str = ""
    """Name of the job, the checkpoint or the archive."""
    reason: str = ""
    rows: int = 0
    """Deleted from the database; 0 in a dry run."""
    error: str = ""
    """Why it could not be deleted; it is tried again in the next round."""


class GcView(Frozen):
    """One round of retention."""

    dry_run: bool
    removals: tuple[RemovalView, ...] = ()
    """What was deleted, or with `dry_run` would be."""
    is_complete: bool = True
    """False: more can be deleted; ask again."""
