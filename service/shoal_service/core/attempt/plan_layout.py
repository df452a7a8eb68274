"""What the machine needs of the planner. The supervisor passes `planner.plan`; a test passes it too, or a pure fake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal_service.core.hardware_profile import HardwareProfile, Racks
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.spec import JobSpec


class HostNeed(Frozen):
    """Predicted host memory of one worker, in bytes. All zero: not known."""

    process: int = 0
    """Memory of the process with everything imported."""
    training: int = 0
    """Memory beyond that at the peak of a step; for a worker with a GPU, what is offloaded to the host."""
    build: int = 0
    """Memory of the whole model, if each worker builds it before it trains; otherwise 0."""
    snapshots: int = 0
    """Memory of the snapshots of the worker's own state, in shared memory, beyond the state that it trains."""
    sent: int = 0
    """Memory of the copies that are made to be sent to the buddy, if the worker has one."""
    kept: int = 0
    """Memory that the copies of this worker take on the buddy."""
    log: int = 0
    """Memory that the gradient log of this worker takes on the buddy."""

    @property
    def own(self) -> int:
        """Bytes that one worker needs beyond its process, without copies on other nodes."""
        return max(self.build, self.training + self.snapshots)

    @property
    def alone(self) -> int:
        """Bytes that a single worker on a machine needs, without copies on other nodes."""
        return self.process + self.own

    def of(self, num_workers: int) -> int:
        """Bytes that `num_workers` workers on one machine need, without copies on other nodes. Forked processes share
        what they have imported."""
        return self.process + num_workers * self.own if num_workers else 0


UNKNOWN_NEED = HostNeed()


class PlannedLayout(Protocol):
    @property
    def layout(self) -> Layout: ...
    @property
    def reason(self) -> str: ...
    @property
    def fits(self) -> bool:
        """Whether the layout is predicted to fit into memory."""

    @property
    def host(self) -> HostNeed: ...

    @property
    def rivals(self) -> Sequence[PlannedLayout]:
        """The same layout at other shard levels, of which only a measurement can tell which is the fastest."""


class PlanLayout(Protocol):
    def __call__(
        self,
        spec: JobSpec,
        world_size: int,
        profile: HardwareProfile | None,
        racks: Racks = (),
        refused: tuple[Layout, ...] = (),
        /,
    ) -> PlannedLayout:
        """Return the layout for at most `world_size` workers. It is a pure function of its arguments, and always has an
        answer. `racks`: where the usable workers are. `refused`: layouts that a proof has refused; the answer never
        uses everything that one of them uses."""
