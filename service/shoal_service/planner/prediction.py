"""Prediction: what a layout would cost, with the reasons. Pure data: the answer of `rank` to REST and `shoal plan`."""

from __future__ import annotations

from pydantic import Field

from shoal_service.core.attempt.plan_layout import UNKNOWN_NEED, HostNeed
from shoal_service.core.hardware_profile import LinkClass
from shoal_service.planner.memory import BytesPart
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import Layout


class Prediction(Frozen):
    """One layout of one job on one kind of hardware."""

    layout: Layout
    name: str
    """The layout in short form."""
    micro_batches_per_rank: int
    """Micro-batches that each rank runs in a step, padding included."""
    step_s: float
    """Seconds of one optimizer step."""
    seconds: dict[SecondsPart, float]
    """Their parts; they add up to step_s."""
    memory_bytes: int
    """Peak of the rank that needs the most."""
    bytes: dict[BytesPart, int]
    """Their parts; they add up to memory_bytes, apart from rounding."""
    fits: bool
    """memory_bytes is within the usable memory."""
    host: HostNeed = UNKNOWN_NEED
    """Host memory of a worker."""
    tokens_per_s: float
    """Tokens per second of the whole job."""
    mfu: float
    """Model FLOPs utilisation: FLOP/s of the model, without recomputation, over the peak of all ranks."""
    links: dict[str, LinkClass] = Field(default_factory=dict)
    """By axis of more than one rank: the slowest class of links that its groups cross."""
    reasons: tuple[str, ...] = ()
    """`rule: sentence`."""

    @property
    def bubble(self) -> float:
        """Share of the step during which the slowest pipeline rank waits."""
        return self.seconds[SecondsPart.BUBBLE] / self.step_s


class Ranking(Frozen):
    """The best layouts of a world, best first."""

    world_size: int
    profile: str
    usable_bytes: int
    """Bytes of one rank that a layout may use."""
    num_params: int = 0
    """Parameters of the model; 0: unknown."""
    num_active_params: int = 0
    """Parameters that one token uses."""
    num_layouts: int = 0
    """Legal layouts."""
    num_fitting: int = 0
    """Legal layouts that fit into memory."""
    predictions: tuple[Prediction, ...] = ()
    """For each combination of degrees, the best choice of schedule, shard level and so on."""
    note: str = ""
    """Why there is no prediction, or what would fit if no layout does."""
