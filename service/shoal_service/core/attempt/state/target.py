"""What an attempt was started with, and what the control plane wants of it now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_service.core.hardware_profile import HardwareProfile
from shoal_workers.contract.course.settings import TrainingSettings, settings_of, with_settings
from shoal_workers.contract.spec import ElasticitySpec, JobSpec, ParallelismSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptConfig:
    """Fixed while the attempt lasts."""

    job_id: str
    attempt: int
    checkpoint_root: str
    timeouts: Timeouts = field(default_factory=Timeouts)
    profile: HardwareProfile | None = None
    """What the planner assumes of the nodes; None: its built-in profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Changed by directives only."""

    spec: JobSpec
    granted: int
    """World size that the scheduler allows."""
    desired: Desired = Desired.RUN
    avoided: tuple[AvoidedNode, ...] = ()
    server_stops: bool = False
    """The server is about to end the cluster, whatever is desired."""
    is_preempted: bool = False
    """Another job gets the workers, whatever is desired."""
    pinned: tuple[str, ...] = ()
    """Names of the checkpoints that retention does not delete."""

    @property
    def ends_saved(self) -> bool:
        """The attempt saves at its next step boundary, and ends: in a pause, because the server stops, or since
        another job gets the workers."""
        return self.server_stops or self.is_preempted or self.desired is Desired.PAUSE

    @property
    def min_workers(self) -> int:
        return self.spec.elasticity.min_workers

    @property
    def num_workers(self) -> int:
        """How many workers should exist, standby included."""
        return self.granted + self.spec.elasticity.standby

    @property
    def keeps_snapshots(self) -> bool:
        return self.spec.snapshot.enabled

    @property
    def settings(self) -> TrainingSettings:
        return settings_of(self.spec)

    def with_settings(self, settings: TrainingSettings) -> Target:
        return replace(self, spec=with_settings(self.spec, settings))

    def with_code(self, archive: str) -> Target:
        code = self.spec.code.model_copy(update={"archive": archive or None})
        return replace(self, spec=self.spec.model_copy(update={"code": code}))

    def with_elasticity(self, elasticity: ElasticitySpec) -> Target:
        return replace(self, spec=self.spec.model_copy(update={"elasticity": elasticity}))

    def with_parallelism(self, parallelism: Literal["auto"] | ParallelismSpec) -> Target:
        return replace(self, spec=self.spec.model_copy(update={"parallelism": parallelism}))
