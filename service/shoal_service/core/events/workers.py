"""Single workers, and incidents: started, lost, slow, about to leave; opened, newest steps saved, closed."""

from __future__ import annotations

from shoal_service.core.events.base import JobEvent, OfNode, OfRank, OfWorker, Severity
from shoal_service.core.node_loss import NodeLossBound
from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract import IncidentCause, Stacks, StateSource, Suspect


class WorkerStarted(
    OfWorker, JobEvent, type="worker.started", severity=Severity.INFO, text="{worker_id:worker} started (pid {pid})"
):
    """A worker has loaded the task and is warm."""

    node_id: str
    node_ip: str
    pid: int
    rack: str = ""
    """Rack of the worker's node; "": the node has no label for racks."""


class WorkerStartFailed(
    OfWorker,
    JobEvent,
    type="worker.start_failed",
    severity=Severity.WARNING,
    text="{worker_id:worker} could not load the task: {error}",
):
    """A new worker could not load the task; the running group goes on without it."""

    error: str


class WorkerLost(
    OfRank,
    JobEvent,
    type="worker.lost",
    severity=Severity.ERROR,
    text="{worker_id:worker}[ (rank {rank})] lost: {cause}[, {message}]",
):
    """A worker died or was evicted."""

    cause: IncidentCause
    message: str


class WarmMemoryOff(
    OfWorker,
    JobEvent,
    type="worker.warm_memory_off",
    severity=Severity.WARNING,
    text="{worker_id:worker}: {message}; new workers touch no memory in advance any more",
):
    """A worker was killed for lack of memory, so new workers no longer touch memory before they need it. Their first
    step is slower; the memory of a worker (`worker.memory_gib`) or of its node is too small."""

    message: str


class WorkerExited(
    OfWorker, JobEvent, type="worker.exited", severity=Severity.INFO, text="{worker_id:worker}: {message}"
):
    """The operating system has reported how the process of a lost worker ended."""

    message: str


class StragglerFound(
    OfWorker,
    JobEvent,
    type="worker.straggler",
    severity=Severity.WARNING,
    text="{worker_id:worker} (rank {rank}) is slow: {compute_s:duration} per step, the others "
    "{median_s:duration}; {action}",
):
    """A worker computed longer than `health.straggler_factor` times the others' median for `health.straggler_steps`
    steps in a row."""

    rank: int
    node_id: str
    compute_s: float
    """Seconds that it computed in its last step."""
    median_s: float
    """Median of the others in that step."""
    step: int
    action: str


class StacksTaken(
    JobEvent, type="worker.stacks", severity=Severity.INFO, text="stacks ({stacks.reason}): {stacks.summary}"
):
    """The stacks of all ranks were taken: their group stood still until an incident began, or one of them is slow."""

    stacks: Stacks
    incident: int | None = None
    """The incident that keeps them too."""


class StepsSlow(
    JobEvent,
    type="worker.slow",
    severity=Severity.WARNING,
    text="steps take {now_s:duration} instead of {usual_s:duration}; "
    "[suspected: {suspect:describe}|nothing stands out]",
):
    """Steps take at least 1.5 times as long as before, or a checkpoint keeps one rank for much longer than others."""

    step: int
    """The step that made it certain."""
    usual_s: float
    """Median time of the steps before."""
    now_s: float
    """Mean time of the slow steps."""
    suspect: Suspect | None
    """null: no rank, no node and no resource stands out."""


class StragglerKept(
    OfRank,
    JobEvent,
    type="worker.straggler_kept",
    severity=Severity.WARNING,
    text="{worker_id:worker}[ (rank {rank})] is slow but stays: {message}",
):
    """No other worker became warm in time to replace a slow one, so it stays."""

    message: str


class WorkerLeaving(
    OfRank,
    JobEvent,
    type="worker.leaving",
    severity=Severity.WARNING,
    text="{worker_id:worker}[ (rank {rank})] will be gone in {grace_s:duration}: {reason}",
):
    """A worker received SIGTERM or a preemption notice and will be gone soon."""

    reason: str
    grace_s: float
    """Seconds until it is gone."""


class NodeSilent(
    OfNode,
    JobEvent,
    type="node.silent",
    severity=Severity.WARNING,
    text="node {node_id:node} ({node_ip}) is silent, {workers:count worker} left out until it answers: {message}",
):
    """A node answers no connect: the job goes on without its workers until it does."""

    node_ip: str
    workers: int
    """Workers of the job on this node."""
    ranks: tuple[int, ...]
    """Those of them that were in the group."""
    message: str


class NodeAnswers(
    OfNode,
    JobEvent,
    type="node.answers",
    severity=Severity.SUCCESS,
    text="node {node_id:node} answers again after {silent_s:duration}",
):
    """A silent node answers again. Its workers are spares, and the group grows at the next step boundary."""

    silent_s: float


class WorkerReleased(
    OfWorker, JobEvent, type="worker.released", severity=Severity.INFO, text="{worker_id:worker} released: {reason}"
):
    """Shoal ended a worker that it does not need, or that has to leave."""

    reason: str


class IncidentOpened(
    JobEvent,
    type="incident.opened",
    severity=Severity.ERROR,
    text="incident {cause}[ of rank {ranks:list}][: {message}][; {node_loss:describe}]",
):
    """A worker of the group was lost, or the group broke."""

    id: int
    cause: IncidentCause
    witness: str
    ranks: tuple[int, ...]
    message: str
    generation: int
    workers: int
    step: int
    node_loss: NodeLossBound | None = None
    """A node was lost: the bound that was in force."""


class IncidentSuspected(
    JobEvent, type="incident.suspected", severity=Severity.WARNING, text="incident {id}, suspected: {suspect:describe}"
):
    """The evidence names whom an open incident suspects."""

    id: int
    suspect: Suspect


class SnapshotsRecovering(
    JobEvent,
    type="snapshot.recovering",
    severity=Severity.WARNING,
    text="workers are started on {nodes:count node} to read the snapshots in memory there, which may "
    "save {steps:count step}",
):
    """The newest snapshots are in the memory of nodes that have no worker any more: workers are started there to read
    them before the group re-forms."""

    nodes: tuple[str, ...]
    steps: int
    """Steps that would be lost otherwise."""
    until: float
    """Seconds since the epoch; the group re-forms without those snapshots then."""


class SnapshotsLacking(JobEvent, type="snapshot.lacking", severity=Severity.ERROR):
    """A rank has no memory for snapshots. Until the next generation no snapshot is whole without its part."""

    generation: int
    step: int
    rank: int
    only_copies: bool
    """Only its copies to other nodes are lacking: a worker's death still costs at most one step."""
    message: str

    def describe(self) -> str:
        what = "sends no more copies to other nodes" if self.only_copies else "keeps no more snapshots in memory"
        return f"rank {self.rank} {what}: {self.message}"


class IncidentClosed(JobEvent, type="incident.closed", severity=Severity.SUCCESS):
    """The first step after the incident is complete."""

    id: int
    cause: IncidentCause
    action: str
    detect_s: float | None
    recovery_s: float | None
    steps_lost: int | None
    from_workers: int
    to_workers: int | None
    state_source: StateSource | None
    bytes_moved: int | None

    def describe(self) -> str:
        parts = [
            None if self.to_workers is None else f"{self.from_workers} -> {count_text(self.to_workers, 'worker')}",
            None if self.detect_s is None else f"detected in {duration_text(self.detect_s)}",
            None if self.recovery_s is None else f"recovered in {duration_text(self.recovery_s)}",
            None if self.steps_lost is None else f"{count_text(self.steps_lost, 'step')} lost",
            None if self.state_source is None else f"state from {self.state_source}",
        ]
        return f"incident {self.cause} closed: {', '.join(part for part in parts if part)}"
