"""HardwareProfile: how fast one kind of node computes, remembers and talks. Pure data.

Built-in ones are in `gpus`; `shoal profile` measures one of the machine it runs on.
"""

from __future__ import annotations

import itertools
import math
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.spec import Precision

GIB = 1 << 30


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


class Link(Frozen):
    """What ranks reach each other by."""

    bandwidth: float = Field(gt=0, allow_inf_nan=False)
    """Bytes per second that one rank sends while it receives as many: the bus bandwidth of a large ring collective."""
    latency_s: dict[int, float]
    """Seconds of a collective on next to nothing, by group size; between sizes by the logarithm."""

    @model_validator(mode="after")
    def _has_latency(self) -> Self:
        if not self.latency_s or min(self.latency_s) < 1 or min(self.latency_s.values()) < 0:
            raise ValueError("latency_s needs seconds (not negative) for at least one group size, from 1 on.")
        return self

    def latency(self, size: float) -> float:
        """Of a group of `size` ranks; beyond the sizes that are known it grows as between the last two."""
        known = sorted(self.latency_s.items())
        if len(known) == 1 or size <= known[0][0]:
            return known[0][1]
        pairs = list(itertools.pairwise(known))
        (low, low_s), (high, high_s) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
        share = math.log(size / low) / math.log(high / low)
        return max(0.0, low_s + share * (high_s - low_s))


class HardwareProfile(Frozen):
    """One rank's share of a node, and the links to the others."""

    name: str
    kind: DeviceKind
    peak_flops: dict[Precision, float]
    """FLOP/s by the data sheet, dense; MFU is counted against it."""
    matmul_efficiency: float = Field(gt=0, le=1)
    """Share of the peak that large matrix products reach."""
    attention_efficiency: float = Field(gt=0, le=1)
    """Share of the peak that fused attention reaches, forward and backward."""
    half_width: float = Field(ge=0)
    """A matrix product whose narrowest side is so wide reaches half of that."""
    memory_bytes: int = Field(gt=0)
    """Of one rank."""
    reserved_bytes: int = Field(ge=0)
    """Taken before the first tensor: driver context, communicators, libraries."""
    usable: float = Field(gt=0, le=1)
    """Share of the memory that may be planned for; the rest is for fragmentation."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes per second that element-wise operations reach."""
    host_bandwidth: float = Field(gt=0)
    """Bytes per second between a device and its host's memory."""
    inside: Link
    """Between ranks of one node."""
    between: Link
    """Between nodes, one rank's part of the network cards."""
    ranks_per_node: int = Field(ge=1)
    processors_per_node: int = Field(0, ge=0)
    """What the ranks of a node share to compute on; 0: each has its own."""
    overlap: float = Field(ge=0, le=1)
    """Share of communication that can hide behind computation."""
    block_overhead_s: float = Field(ge=0)
    """Launching one block's forward and backward pass for one micro-batch, over what the arithmetic takes."""
    step_overhead_s: float = Field(ge=0)
    """Votes, clipping, reports: once a step."""
    measured: bool = False
    """By `shoal profile`; else from public figures."""

    @property
    def usable_bytes(self) -> float:
        return self.usable * self.memory_bytes

    def sharing(self, world_size: int) -> float:
        """How many ranks of a node compete for one processor's time."""
        if not self.processors_per_node:
            return 1.0
        return max(1.0, min(world_size, self.ranks_per_node) / self.processors_per_node)
