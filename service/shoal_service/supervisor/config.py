"""What a supervisor gets at its start, and what the control plane wants of it later. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.attempt.messages import Directed
from shoal_service.core.attempt.state import AGENTS_FROM, AvoidedNode, Timeouts
from shoal_service.core.endings import LostAttempt
from shoal_service.core.goodput import Goodput
from shoal_service.home import Home
from shoal_service.planner import HardwareProfile
from shoal_workers.contract import (
    Frozen,
    JobSpec,
    LogSettings,
    ProfileRequest,
    SnapshotScope,
    Standing,
)
from shoal_workers.contract.base import FieldError


class SupervisorConfig(Frozen):
    """Arguments of the actor; Ray passes the same ones again when it restarts the actor."""

    job_id: str
    attempt: int
    version: int = 1
    """Version of the wire: that of the control plane's release; see WIRE_VERSION."""
    spec: JobSpec
    checkpoint_root: str
    """URL of this job's checkpoint directory."""
    granted: int
    """Most workers that may train at a time: the world size that the scheduler has granted."""
    epoch: int
    """Lease epoch of the control plane that started it."""
    spec_version: int
    code_uri: str | None = None
    """URI of the job's code, `gcs://...zip`, for the runtime environment of the workers; None if the job has none."""
    timeouts: Timeouts = Timeouts()
    home: Home | None = None
    """Where the supervisor reports; None means nowhere. Its own process then reads its outbox, as tests and benchmarks
    do."""
    snapshot_key: str = ""
    """Shared secret of the attempt's workers; see WorkerConfig."""
    avoid: tuple[AvoidedNode, ...] = ()
    """Nodes on which no worker is started. Each directive replaces this list."""
    pinned: tuple[str, ...] = ()
    """Names of the checkpoints that retention does not delete. Each directive replaces this list."""
    newest: str | None = None
    """Name of the newest checkpoint that the job has committed, as the store knows it; None if the job has none."""
    silent: tuple[str, ...] = ()
    """Nodes whose hosts answered no connect when this supervisor was started in the place of another one."""
    profile: HardwareProfile | None = None
    """Hardware profile of the workers' nodes; None if it was not measured."""
    fork_workers: bool = True
    """Workers are forked from a process of their node that has imported torch; see shoal_workers.forkserver."""
    agents_from: int = AGENTS_FROM
    """Workers of a job from which on its nodes get agents that poll them; 0: no agents."""
    snapshot_scope: SnapshotScope = SnapshotScope.MACHINE
    """Which workers share the snapshots in shared memory."""
    rack_label: str = ""
    """Name of the label of a Ray node that says in which rack it is."""
    logs: LogSettings = LogSettings()
    """How the supervisor and its workers write their logs."""
    goodput: Goodput | None = None
    """The job's ledger before this attempt, which continues it."""
    standing: Standing | None = None
    """What the validations of the attempts before have shown."""
    lost: LostAttempt | None = None
    """The attempt before, if it was lost with its cluster and no step was completed since; otherwise None."""

    @property
    def forks_workers(self) -> bool:
        """True if the workers are forked. Workers with GPUs are not: see `workers/processes.py`."""
        return self.fork_workers and not self.spec.worker.gpus


class StacksRequest(Frozen):
    """A user asks what the workers do. The answer is in a report."""

    number: int
    """Number of the request, different from that of every other request."""
    rank: int | None
    """Rank of the worker; None means all workers."""
    native: bool
    """True if frames of native code are asked for too."""


class Directive(Directed):
    """All that the control plane wants: of the attempt, and of its supervisor. Each one is complete, so a repeated or
    late one does no harm."""

    epoch: int
    number: int = 0
    """Unused."""
    version: int = 1
    """Version of the wire: that of the control plane's release; see WIRE_VERSION."""
    spec_version: int
    avoid: tuple[AvoidedNode, ...] = ()
    """Nodes that are drained or on probation."""
    profile: ProfileRequest | None = None
    """The open request for a profile; None if there is none."""
    stacks: StacksRequest | None = None
    """The open request for stacks; None if there is none."""


def checkpoint_root(spec: JobSpec, default_url: str, job_id: str) -> str:
    """URL of a job's directory in the storage. `default_url`: for specs without a `checkpoint.url`."""
    return f"{(spec.checkpoint.url or default_url).rstrip('/')}/{job_id}"


def with_origin(spec: JobSpec, default_url: str) -> JobSpec:
    """The spec of a script that continues another one, with the URL of that one's directory, also if it is in the
    server's own place for checkpoints."""
    origin = spec.continue_from
    if spec.script is None or origin is None or origin.url is not None:
        return spec
    url = f"{default_url.rstrip('/')}/{origin.job}"
    return spec.model_copy(update={"continue_from": origin.model_copy(update={"url": url})})


@dataclass(eq=False)
class StaleEpoch(FieldError, text="lease epoch {epoch} is over; the current one is {current}"):
    """The directive comes from a control plane whose lease is over: another one owns the jobs now."""

    epoch: int
    current: int
