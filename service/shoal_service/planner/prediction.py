"""Prediction: what a layout would cost, with its reasons. Pure data."""

from __future__ import annotations

from shoal_service.planner.memory import BytesPart
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import Layout


class Prediction(Frozen):
    """One layout of one job on one kind of hardware."""

    layout: Layout
    name: str
    """Short form of the layout."""
    micro_batches_per_rank: int
    """That each rank runs in a step, padding included."""
    step_s: float
    """Seconds of an optimizer step."""
    seconds: dict[SecondsPart, float]
    """Where they go; adds up to step_s."""
    memory_bytes: int
    """Of the rank that needs most, at its peak."""
    bytes: dict[BytesPart, int]
    """Where they go; adds up to memory_bytes, up to rounding."""
    fits: bool
    """memory_bytes is at most what may be planned for."""
    tokens_per_s: float
    """Of the whole job."""
    mfu: float
    """Model FLOPs utilisation: arithmetic of the model, nothing recomputed, over the peak of all ranks."""
    reasons: tuple[str, ...] = ()
    """`rule: sentence`."""

    @property
    def bubble(self) -> float:
        """Share of the step in which the slowest pipeline rank waits."""
        return self.seconds[SecondsPart.BUBBLE] / self.step_s


class Ranking(Frozen):
    """The best layouts of a world, best first."""

    world_size: int
    profile: str
    usable_bytes: int
    """Memory of one rank that may be planned for."""
    num_params: int = 0
    """Of the model; 0: unknown."""
    num_active_params: int = 0
    """Of which a token uses so many."""
    num_layouts: int = 0
    """Legal ones."""
    num_fitting: int = 0
    """Of which fit into memory."""
    predictions: tuple[Prediction, ...] = ()
    """The best choice of schedule, shard level ... for each product of degrees."""
    note: str = ""
    """Why there is nothing, or what would fit where nothing does."""
