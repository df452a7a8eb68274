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
    """The process with everything imported."""
    training: int = 0
    """At the peak of a step, beyond that. Of workers with a GPU: what is offloaded."""
    build: int = 0
    """The whole model, if each worker builds it; before it trains."""
    snapshots: int = 0
    """Snapshots of its own state, in shared memory, beyond the state that it trains."""
    sent: int = 0
    """Copies that are made to be sent, if it has a buddy."""
    kept: int = 0
    """Copies that the buddy keeps of it."""
    log: int = 0
    """The gradient log that the buddy keeps of it."""

    @property
    def own(self) -> int:
        """Beyond its process, without copies on other nodes."""
        return max(self.build, self.training + self.snapshots)

    @property
    def alone(self) -> int:
        """The need of one worker on a machine, without copies on other nodes."""
        return self.process + self.own

    def of(self, num_workers: int) -> int:
        """Bytes of `num_workers` workers on one machine, without copies on other nodes. Forked processes share what
        they have imported."""
        return self.process + num_workers * self.own if num_workers else 0


UNKNOWN_NEED = HostNeed()


class PlannedLayout(Protocol):
    @property
    def layout(self) -> Layout: ...
    @property
    def reason(self) -> str: ...
    @property
    def fits(self) -> bool:
        """Predicted to fit into memory."""

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
        """The layout for at most `world_size` workers: a function of its arguments, which always has an answer.
        `racks`: where the usable workers are. `refused`: layouts that a proof has refused; none that uses all that one
        of them uses is the answer."""
