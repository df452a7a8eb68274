"""Seconds of a collective, by where its ranks are. `step_time` calls this; arrays have one entry for each layout.

The ring model of NCCL's documentation: all-gather and reduce-scatter of B bytes over n ranks move (n - 1) / n x B
through every rank, and all-reduce twice that. A ring over several nodes has the bandwidth of the network cards of all
its ranks on one node together, and a ring over several racks that of the shares of the uplinks of all its ranks in one
rack. Its latency is that of the slowest class of links that it crosses. `links` says where the ranks of an axis are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_service.core.hardware_profile import HardwareProfile, LinkClass

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LINK_CLASSES = tuple(LinkClass)


@dataclass(frozen=True, slots=True)
class Span:
    """Where the groups of an axis are."""

    size: Ints
    """Ranks of a group."""
    link: Ints
    """Index into LINK_CLASSES: the slowest class that any of the groups crosses."""
    per_node: Ints
    """Ranks of a group on one node; the least of all nodes."""
    per_rack: Ints


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one axis: where they are, ring bandwidth and latency."""

    span: Span
    bandwidth: Floats
    latency_s: Floats
    sharing: Floats | float
    profile: HardwareProfile

    @property
    def size(self) -> Ints:
        return self.span.size

    def gather_s(self, whole_bytes: Floats) -> Floats:
        """All-gather to, or reduce-scatter of, `whole_bytes`; 0 for a group of one."""
        moved = (self.size - 1) / self.size * whole_bytes
        return np.where(self.size > 1, moved / self.bandwidth + self.latency_s, 0.0)

    def reduce_s(self, whole_bytes: Floats) -> Floats:
        """All-reduce."""
        return 2 * self.gather_s(whole_bytes)

    def exchange_s(self, sent_bytes: Floats) -> Floats:
        """All-to-all: each rank sends `sent_bytes`, an equal part to every rank. All classes of links work together."""
        size, profile = self.size, self.profile
        to_node = np.where(self.span.link >= 1, size - self.span.per_node, 0) / size
        to_rack = np.where(self.span.link >= 2, size - self.span.per_rack, 0) / size
        inside, between, racks = (
            share * sent_bytes / profile.link(crossed).bandwidth * self.sharing
            for share, crossed in zip((1 - 1 / size - to_node, to_node, to_rack), LINK_CLASSES, strict=True)
        )
        slowest = np.maximum(np.maximum(inside, between), racks)
        return np.where(size > 1, slowest + self.latency_s, 0.0)


def group(profile: HardwareProfile, span: Span, sharing: Floats | float = 1.0) -> Group:
    """The groups of an axis.

    `sharing`: ranks that compete for one processor (`HardwareProfile.sharing` of the world). All groups of an axis
    communicate at the same time, so sending takes this many times longer. Latencies were measured while the ranks of
    one group competed.
    """
    inside, between, racks = (profile.link(crossed).bandwidth for crossed in LINK_CLASSES)
    # each rank of a node may use its own cards, but not more than the links inside the node carry
    rails = np.minimum(inside, span.per_node * between)
    bandwidth = np.choose(span.link, [np.full_like(rails, inside), rails, np.minimum(rails, span.per_rack * racks)])
    latency_s = np.choose(span.link, [_by_size(span.size, profile.link(crossed).latency) for crossed in LINK_CLASSES])
    more = sharing / _by_size(span.size, profile.sharing)
    return Group(span, bandwidth / sharing, more * latency_s, sharing, profile)


def send_s(profile: HardwareProfile, num_bytes: Floats, link: Ints) -> Floats:
    """One message to the next rank of a group. `link`: the class of links that the group crosses."""
    links = [profile.link(crossed) for crossed in LINK_CLASSES]
    return np.choose(link, [num_bytes / one.bandwidth + one.latency(2) for one in links])


def _by_size(sizes: Ints, of: Callable[[int], float]) -> Floats:
    distinct, index = np.unique(sizes, return_inverse=True)
    return np.array([of(int(size)) for size in distinct])[index]
