"""The planned layout of a group, and the host memory that it needs: an answer of the planner to the attempt machine.

The supervisor passes `planner.plan` to the machine; a test passes it too, or a pure fake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal_service.core.hardware_profile import HardwareProfile, Racks
from shoal_workers.contract import Frozen, JobSpec, Layout


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


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout, and why it was chosen."""

    layout: Layout
    reason: str
    rank_bytes: int = 0
    """Predicted bytes of the rank that needs the most, without those of a process that has no model and without
    snapshots; 0 if unknown."""
    fits: bool = True
    """Predicted to fit into memory, or the sizes of the model are unknown."""
    host: HostNeed = UNKNOWN_NEED
    """Host memory of a worker; all zero: not known."""
    rivals: tuple[Plan, ...] = ()
    """The same at other shard levels, if their steps are predicted to be so similar that only a measurement can tell
    which is the fastest."""


class PlanLayout(Protocol):
    def __call__(
        self,
        spec: JobSpec,
        world_size: int,
        profile: HardwareProfile | None,
        racks: Racks = (),
        refused: tuple[Layout, ...] = (),
        /,
    ) -> Plan:
        """Return the layout for at most `world_size` workers. It is a pure function of its arguments, and always has an
        answer. `racks`: where the usable workers are. `refused`: layouts that a proof has refused; the answer never
        uses everything that one of them uses."""
