"""Single workers, and incidents: started, lost, slow, about to leave; opened, newest steps saved, closed."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.node_loss import NodeLossBound
from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract import IncidentCause, Stacks, StateSource, Suspect


class WorkerStarted(JobEvent):
    """A worker has loaded the task and is warm."""

    type: ClassVar[str] = "worker.started"
    severity: ClassVar[Severity] = Severity.INFO

    worker_id: str
    node_id: str
    node_ip: str
    pid: int
    rack: str = ""
    """Rack of the worker's node; "": the node has no label for racks."""

    def words(self) -> str:
        return f"{worker_text(self.worker_id)} started (pid {self.pid})"


class WorkerStartFailed(JobEvent):
    """A new worker could not load the task; the running group goes on without it."""

    type: ClassVar[str] = "worker.start_failed"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    error: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id)} could not load the task: {self.error}"


class WorkerLost(JobEvent):
    """A worker died or was evicted."""

    type: ClassVar[str] = "worker.lost"
    severity: ClassVar[Severity] = Severity.ERROR

    worker_id: str
    rank: int | None
    """null: it was not in the group."""
    cause: IncidentCause
    message: str

    def words(self) -> str:
        message = f", {self.message}" if self.message else ""
        return f"{worker_text(self.worker_id, self.rank)} lost: {self.cause}{message}"


class WarmMemoryOff(JobEvent):
    """A worker was killed for lack of memory, so new workers no longer touch memory before they need it. Their first
    step is slower; the memory of a worker (`worker.memory_gib`) or of its node is too small."""

    type: ClassVar[str] = "worker.warm_memory_off"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    message: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id)}: {self.message}; new workers touch no memory in advance any more"


class WorkerExited(JobEvent):
    """The operating system has reported how the process of a lost worker ended."""

    type: ClassVar[str] = "worker.exited"
    severity: ClassVar[Severity] = Severity.INFO

    worker_id: str
    message: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id)}: {self.message}"


class StragglerFound(JobEvent):
    """A worker computed longer than `health.straggler_factor` times the others' median for `health.straggler_steps`
    steps in a row."""

    type: ClassVar[str] = "worker.straggler"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    rank: int
    node_id: str
    compute_s: float
    """Seconds that it computed in its last step."""
    median_s: float
    """Median of the others in that step."""
    step: int
    action: str

    def words(self) -> str:
        own_time, others = duration_text(self.compute_s), duration_text(self.median_s)
        name = worker_text(self.worker_id, self.rank)
        return f"{name} is slow: {own_time} per step, the others {others}; {self.action}"


class StacksTaken(JobEvent):
    """The stacks of all ranks were taken: their group stood still until an incident began, or one of them is slow."""

    type: ClassVar[str] = "worker.stacks"
    severity: ClassVar[Severity] = Severity.INFO

    stacks: Stacks
    incident: int | None = None
    """The incident that keeps them too."""

    def words(self) -> str:
        return f"stacks ({self.stacks.reason}): {self.stacks.summary}"


class StepsSlow(JobEvent):
    """Steps take at least 1.5 times as long as before, or a checkpoint keeps one rank for much longer than others."""

    type: ClassVar[str] = "worker.slow"
    severity: ClassVar[Severity] = Severity.WARNING

    step: int
    """The step that made it certain."""
    usual_s: float
    """Median time of the steps before."""
    now_s: float
    """Mean time of the slow steps."""
    suspect: Suspect | None
    """null: no rank, no node and no resource stands out."""

    def words(self) -> str:
        who = f"suspected: {self.suspect.words()}" if self.suspect is not None else "nothing stands out"
        return f"steps take {duration_text(self.now_s)} instead of {duration_text(self.usual_s)}; {who}"


class StragglerKept(JobEvent):
    """No other worker became warm in time to replace a slow one, so it stays."""

    type: ClassVar[str] = "worker.straggler_kept"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    rank: int | None
    message: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id, self.rank)} is slow but stays: {self.message}"


class WorkerLeaving(JobEvent):
    """A worker received SIGTERM or a preemption notice and will be gone soon."""

    type: ClassVar[str] = "worker.leaving"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    rank: int | None
    """null: it is not in the group."""
    reason: str
    grace_s: float
    """Seconds until it is gone."""

    def words(self) -> str:
        name = worker_text(self.worker_id, self.rank)
        return f"{name} will be gone in {duration_text(self.grace_s)}: {self.reason}"


class NodeSilent(JobEvent):
    """A node answers no connect: the job goes on without its workers until it does."""

    type: ClassVar[str] = "node.silent"
    severity: ClassVar[Severity] = Severity.WARNING

    node_id: str
    node_ip: str
    workers: int
    """Workers of the job on this node."""
    ranks: tuple[int, ...]
    """Those of them that were in the group."""
    message: str

    def words(self) -> str:
        workers = count_text(self.workers, "worker")
        return (
            f"node {self.node_id[:12]} ({self.node_ip}) is silent, {workers} left out until it answers: {self.message}"
        )


class NodeAnswers(JobEvent):
    """A silent node answers again. Its workers are spares, and the group grows at the next step boundary."""

    type: ClassVar[str] = "node.answers"
    severity: ClassVar[Severity] = Severity.SUCCESS

    node_id: str
    silent_s: float

    def words(self) -> str:
        return f"node {self.node_id[:12]} answers again after {duration_text(self.silent_s)}"


class WorkerReleased(JobEvent):
    """Shoal ended a worker that it does not need, or that has to leave."""

    type: ClassVar[str] = "worker.released"
    severity: ClassVar[Severity] = Severity.INFO

    worker_id: str
    reason: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id)} released: {self.reason}"


def worker_text(worker_id: str, rank: int | None = None) -> str:
    """Name of a worker for people, `worker 3 (rank 1)`; 3 is its number in the attempt, the last part of its id."""
    name = f"worker {worker_id.rpartition('/')[2]}"
    return name if rank is None else f"{name} (rank {rank})"


class IncidentOpened(JobEvent):
    """A worker of the group was lost, or the group broke."""

    type: ClassVar[str] = "incident.opened"
    severity: ClassVar[Severity] = Severity.ERROR

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

    def words(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.ranks)
        where = f" of rank {ranks}" if ranks else ""
        message = f": {self.message}" if self.message else ""
        bound = f"; {self.node_loss.words()}" if self.node_loss is not None else ""
        return f"incident {self.cause}{where}{message}{bound}"


class IncidentSuspected(JobEvent):
    """The evidence names whom an open incident suspects."""

    type: ClassVar[str] = "incident.suspected"
    severity: ClassVar[Severity] = Severity.WARNING

    id: int
    suspect: Suspect

    def words(self) -> str:
        return f"incident {self.id}, suspected: {self.suspect.words()}"


class SnapshotsRecovering(JobEvent):
    """The newest snapshots are in the memory of nodes that have no worker any more: workers are started there to read
    them before the group re-forms."""

    type: ClassVar[str] = "snapshot.recovering"
    severity: ClassVar[Severity] = Severity.WARNING

    nodes: tuple[str, ...]
    steps: int
    """Steps that would be lost otherwise."""
    until: float
    """Seconds since the epoch; the group re-forms without those snapshots then."""

    def words(self) -> str:
        steps, nodes = count_text(self.steps, "step"), count_text(len(self.nodes), "node")
        return f"workers are started on {nodes} to read the snapshots in memory there, which may save {steps}"


class SnapshotsLacking(JobEvent):
    """A rank has no memory for snapshots. Until the next generation no snapshot is whole without its part."""

    type: ClassVar[str] = "snapshot.lacking"
    severity: ClassVar[Severity] = Severity.ERROR

    generation: int
    step: int
    rank: int
    only_copies: bool
    """Only its copies to other nodes are lacking: a worker's death still costs at most one step."""
    message: str

    def words(self) -> str:
        what = "sends no more copies to other nodes" if self.only_copies else "keeps no more snapshots in memory"
        return f"rank {self.rank} {what}: {self.message}"


class IncidentClosed(JobEvent):
    """The first step after the incident is complete."""

    type: ClassVar[str] = "incident.closed"
    severity: ClassVar[Severity] = Severity.SUCCESS

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

    def words(self) -> str:
        parts = [
            None if self.to_workers is None else f"{self.from_workers} -> {count_text(self.to_workers, 'worker')}",
            None if self.detect_s is None else f"detected in {duration_text(self.detect_s)}",
            None if self.recovery_s is None else f"recovered in {duration_text(self.recovery_s)}",
            None if self.steps_lost is None else f"{count_text(self.steps_lost, 'step')} lost",
            None if self.state_source is None else f"state from {self.state_source}",
        ]
        return f"incident {self.cause} closed: {', '.join(part for part in parts if part)}"
