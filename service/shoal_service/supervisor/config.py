"""What a supervisor is born with, and what the control plane tells it later. Pure data."""

from __future__ import annotations

from typing import Literal

from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_service.planner import HardwareProfile
from shoal_service.views import Goodput
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.log_settings import LogSettings
from shoal_workers.contract.spec import ElasticitySpec, JobSpec, ParallelismSpec


class SupervisorConfig(Frozen):
    """Arguments of the actor; Ray passes the same ones again when it restarts the worker."""

    job_id: str
    attempt: int
    spec: JobSpec
    checkpoint_root: str
    """URL of this job's checkpoint directory."""
    granted: int
    epoch: int
    """Lease epoch of the control plane that started it."""
    spec_version: int
    code_uri: str | None = None
    """`gcs://...zip`, for the runtime environment of the shards."""
    timeouts: Timeouts = Timeouts()
    snapshot_key: str = ""
    """Shared secret of the attempt's shards; see WorkerConfig."""
    avoid: tuple[AvoidedNode, ...] = ()
    """Nodes on which nothing is started; the newest directive says which they are by now."""
    profile: HardwareProfile | None = None
    """Of the workers' nodes, if it was measured."""
    fork_workers: bool = True
    """Shards come from a server on their node that has imported everything; see shoal_workers.forkserver."""
    logs: LogSettings = LogSettings()
    """Of the supervisor and its workers."""
    goodput: Goodput | None = None
    """What was booked of the job before this attempt, which goes on with it."""


class Directive(Frozen):
    """What the control plane wants, whole: level-triggered, so a repeated or late one does no harm."""

    epoch: int
    granted: int
    desired: Desired
    elasticity: ElasticitySpec
    parallelism: Literal["auto"] | ParallelismSpec
    spec_version: int
    avoid: tuple[AvoidedNode, ...] = ()
    """Nodes that are drained or on probation, by id."""


class StaleEpoch(Exception):
    """The caller's lease is over: another control plane owns the jobs now."""

    def __init__(self, epoch: int, current: int) -> None:
        super().__init__(epoch, current)
        self.epoch = epoch
        self.current = current

    def __str__(self) -> str:
        return f"lease epoch {self.epoch} is over; the current one is {self.current}"
