"""POLICIES: every policy that a simulation knows by name."""

from __future__ import annotations

from shoal_service.simulator.named_policy import NamedPolicy
from shoal_service.simulator.peers.registry import PEERS

POLICIES: dict[str, NamedPolicy] = dict(PEERS)
