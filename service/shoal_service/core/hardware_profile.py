"""HardwareProfile: how fast one kind of node computes, moves memory and communicates. Pure data.

The planner reads it, and a job keeps its own with its attempt. Built-in profiles are in `planner/gpus.py`; `shoal
profile` measures the machine that it runs on.
"""

from __future__ import annotations

import itertools
import math
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shoal_workers.contract import Frozen, Precision

GIB = 1 << 30

Racks = tuple[tuple[int, ...], ...]
"""By rack: the number of workers of each of its nodes. (): not known."""

_OVERSUBSCRIPTION = 2.0
"""Assumed bandwidth of the nodes of a rack, relative to its uplinks, if a profile has no `between_racks`. Clusters are
built with 1 (as much bandwidth up as down) to several."""


WIDE_HEAD = 128
NARROW_HEAD_SHARE = 0.9
"""FlashAttention with heads of 64 reaches this share of its rate with heads of 128 (Shah et al. 2024, figures 5, 6)."""


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


class LinkClass(StrEnum):
    """The links that a group of ranks uses: the slowest that it crosses. From the fastest to the slowest."""

    INSIDE_NODE = "inside_node"
    BETWEEN_NODES = "between_nodes"
    """Links between nodes of one rack."""
    BETWEEN_RACKS = "between_racks"

    @property
    def words(self) -> str:
        return _LINK_WORDS[self]


_LINK_WORDS = {
    LinkClass.INSIDE_NODE: "inside nodes",
    LinkClass.BETWEEN_NODES: "between nodes",
    LinkClass.BETWEEN_RACKS: "between racks",
}


class Link(Frozen):
    """The connection between two ranks."""

    bandwidth: float = Field(gt=0, allow_inf_nan=False)
    """Bytes per second that one rank sends while it receives as many: the bus bandwidth of a large ring collective."""
    latency_s: dict[int, float]
    """Seconds of a collective on a few bytes, by group size; interpolated by the logarithm of the size."""

    @model_validator(mode="after")
    def _has_latency(self) -> Self:
        if not self.latency_s or min(self.latency_s) < 1 or min(self.latency_s.values()) < 0:
            raise ValueError("latency_s must give seconds, at least 0, for at least one group size, from 1 on.")
        return self

    def latency(self, size: float) -> float:
        """Seconds for a group of `size` ranks. Beyond the known sizes it grows as between the last two."""
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
    """FLOP/s of the data sheet, dense; MFU is relative to it."""
    matmul_efficiency: float = Field(gt=0, le=1)
    """Share of the peak that large matrix products reach."""
    attention_efficiency: float = Field(gt=0, le=1)
    """Share of the peak that fused attention reaches, forward and backward."""
    half_width: float = Field(ge=0)
    """A matrix product whose narrowest side has this width reaches half of that rate. Unused with `multiprocessors`."""
    multiprocessors: int = Field(0, ge=0)
    """Parts of a GPU that each compute one tile of a matrix product at a time; 0: unknown."""
    fp8_speed: float = Field(1.0, gt=0)
    """Rate of large matrix products in fp8, relative to bf16; 1 if the device has none."""
    attention_rates: dict[int, tuple[float, float]] = Field(default_factory=dict)
    """FLOP/s of fused causal attention with heads of 128 by sequence length, forward and backward; empty:
    `attention_efficiency` at every length."""
    vendor_attention: float = Field(1.0, gt=0)
    """Speed of the vendor's attention kernel, relative to these."""
    spread: float = Field(0.0, ge=0, lt=1)
    """Standard deviation of the speeds of equal devices, relative to their mean."""
    memory_bytes: int = Field(gt=0)
    """Memory of one rank."""
    reserved_bytes: int = Field(ge=0)
    """Bytes in use before the first tensor: driver context, communicators, libraries."""
    usable: float = Field(gt=0, le=1)
    """Share of the memory that a layout may use; the rest is for fragmentation."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes per second that element-wise operations reach."""
    host_bandwidth: float = Field(gt=0)
    """Bytes per second between a device and its host's memory."""
    inside: Link
    """Link between ranks of one node."""
    between: Link
    """Link between nodes of a rack: the share of the network cards of one rank."""
    between_racks: Link | None = None
    """Between racks: the share of the rack's uplinks of one rank. Without it: half the bandwidth of `between`, and its
    latency."""
    ranks_per_node: int = Field(ge=1)
    processors_per_node: int = Field(0, ge=0)
    """Processors that the ranks of a node share; 0: each rank has its own."""
    overlap: float = Field(ge=0, le=1)
    """Share of communication that can overlap with computation."""
    block_overhead_s: float = Field(ge=0)
    """Seconds to launch the forward and backward pass of one block for one micro-batch, besides the arithmetic."""
    step_overhead_s: float = Field(ge=0)
    """Seconds once a step: votes, clipping, reports."""
    measured: bool = False
    """By `shoal profile`; otherwise from public figures."""

    @property
    def usable_bytes(self) -> float:
        return self.usable * self.memory_bytes

    def link(self, crossed: LinkClass) -> Link:
        match crossed:
            case LinkClass.INSIDE_NODE:
                return self.inside
            case LinkClass.BETWEEN_NODES:
                return self.between
            case LinkClass.BETWEEN_RACKS:
                if self.between_racks is not None:
                    return self.between_racks
                return self.between.model_copy(update={"bandwidth": self.between.bandwidth / _OVERSUBSCRIPTION})

    def sharing(self, world_size: int) -> float:
        """Number of ranks of a node that compete for one processor."""
        if not self.processors_per_node:
            return 1.0
        return max(1.0, min(world_size, self.ranks_per_node) / self.processors_per_node)
