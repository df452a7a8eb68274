"""What the machine needs of the planner. The supervisor passes `planner.plan`; a test passes it too, or a pure fake."""

from __future__ import annotations

from typing import Protocol

from shoal_service.core.hardware_profile import HardwareProfile
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.spec import JobSpec


class PlannedLayout(Protocol):
    @property
    def layout(self) -> Layout: ...
    @property
    def reason(self) -> str: ...
    @property
    def fits(self) -> bool:
        """Predicted to fit into memory."""


class PlanLayout(Protocol):
    def __call__(
        self, spec: JobSpec, world_size: int, profile: HardwareProfile | None, nodes: tuple[int, ...] = (), /
    ) -> PlannedLayout:
        """The layout for at most `world_size` workers: a function of its arguments, which always has an answer.
        `nodes`: the usable workers of each node."""
