"""NodeTable: what Ray's head knows of the nodes, as far as a supervisor needs it. Pure data, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeTable:
    dead: frozenset[str] = frozenset()
    draining: dict[str, float | None] = field(default_factory=dict)
    """By node id: the wall-clock time at which the node goes away; None means unknown."""
    raylets: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Address and port of each live node's raylet, by node id."""
    head: str = ""
    """The node of Ray's head; empty: not known."""
