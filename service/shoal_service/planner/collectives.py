"""Seconds of a collective, by where its ranks are. `step_time` calls this; arrays have one entry for each layout.

Ranks are numbered with tp fastest, then cp, dp_shard, dp_replicate and pp, and neighbours share a node. So the
ranks of one group of an axis are `stride` apart, where stride is the product of the axes that vary faster:

    node 0: 0 1 2 3 4 5 6 7    tp 4: (0 1 2 3) (4 5 6 7), stride 1, inside a node
    node 1: 8 9 ...            dp_shard 4: (0 4 8 12) (1 5 9 13) ..., stride 4, two ranks in each node

The ring model of NCCL's documentation: all-gather and reduce-scatter of B bytes over n ranks move (n - 1) / n x B
through every rank, and all-reduce twice that. A ring over several nodes has the bandwidth of the network cards of all
its ranks on one node together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_service.core.hardware_profile import HardwareProfile

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one axis: size, ring bandwidth and latency."""

    size: Ints
    bandwidth: Floats
    latency_s: Floats
    remote_share: Floats
    """Of the ranks of a group, the share that is on other nodes."""
    sharing: Floats | float
    profile: HardwareProfile

    def gather_s(self, whole_bytes: Floats) -> Floats:
        """All-gather to, or reduce-scatter of, `whole_bytes`; 0 for a group of one."""
        moved = (self.size - 1) / self.size * whole_bytes
        return np.where(self.size > 1, moved / self.bandwidth + self.latency_s, 0.0)

    def reduce_s(self, whole_bytes: Floats) -> Floats:
        """All-reduce."""
        return 2 * self.gather_s(whole_bytes)

    def exchange_s(self, sent_bytes: Floats) -> Floats:
        """All-to-all: each rank sends `sent_bytes`, an equal part to every rank. Both kinds of links work together."""
        inside = (1 - 1 / self.size - self.remote_share) * sent_bytes / self.profile.inside.bandwidth * self.sharing
        between = self.remote_share * sent_bytes / self.profile.between.bandwidth * self.sharing
        return np.where(self.size > 1, np.maximum(inside, between) + self.latency_s, 0.0)


def group(profile: HardwareProfile, size: Ints, stride: Ints, sharing: Floats | float = 1.0) -> Group:
    """The groups of an axis of degree `size` whose ranks are `stride` apart.

    `sharing`: ranks that compete for one processor (`HardwareProfile.sharing` of the world). All groups of an axis
    communicate at the same time, so sending takes this many times longer. Latencies were measured while the ranks of
    one group competed.
    """
    per_node = np.minimum(size, np.maximum(1, profile.ranks_per_node // stride))
    is_inside = size * stride <= profile.ranks_per_node
    more = sharing / _by_size(size, profile.sharing)
    # each rank of a node may use its own cards, but not more than the links inside the node carry
    rails = np.minimum(profile.inside.bandwidth, per_node * profile.between.bandwidth)
    return Group(
        size=size,
        bandwidth=np.where(is_inside, profile.inside.bandwidth, rails) / sharing,
        latency_s=more
        * np.where(is_inside, _by_size(size, profile.inside.latency), _by_size(size, profile.between.latency)),
        remote_share=np.where(is_inside, 0.0, (size - per_node) / size),
        sharing=sharing,
        profile=profile,
    )


def send_s(profile: HardwareProfile, num_bytes: Floats, stride: Ints) -> Floats:
    """One message to the rank whose number is `stride` larger."""
    is_inside = stride * 2 <= profile.ranks_per_node
    inside = num_bytes / profile.inside.bandwidth + profile.inside.latency(2)
    between = num_bytes / profile.between.bandwidth + profile.between.latency(2)
    return np.where(is_inside, inside, between)


def _by_size(sizes: Ints, of: Callable[[int], float]) -> Floats:
    distinct, index = np.unique(sizes, return_inverse=True)
    return np.array([of(int(size)) for size in distinct])[index]
