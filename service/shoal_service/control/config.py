"""ControlConfig: what `shoal serve` gives the control loop, which passes it to its drivers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_service.core.attempt.state import AGENTS_FROM
from shoal_service.core.nodes import DEFAULT_PROBATION_LIMIT
from shoal_service.planner import HardwareProfile
from shoal_workers.contract import LogSettings, SnapshotScope


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    owner: str
    """Unique name of this control plane process."""
    lease_ttl_s: float
    checkpoint_url: str
    """Checkpoint directory of jobs without a `checkpoint.url`."""
    max_probation: str = DEFAULT_PROBATION_LIMIT
    """See `core.nodes.probation_limit`."""
    profiles: tuple[HardwareProfile, ...] = ()
    """The planner uses those that were measured on nodes of this cluster."""
    fork_workers: bool = True
    """See SupervisorConfig."""
    agents_from: int = AGENTS_FROM
    snapshot_scope: SnapshotScope = SnapshotScope.MACHINE
    rack_label: str = ""
    """See SupervisorConfig."""
    scale_out: bool = False
    """True if nodes for unmet demand are asked of Ray's autoscaler."""
    logs: LogSettings = field(default_factory=LogSettings)
    """Log settings of the supervisors and workers that are started."""
