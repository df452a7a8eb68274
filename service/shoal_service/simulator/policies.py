"""POLICIES: every policy that a simulation knows by name; `shoal` is the one that the service itself uses."""

from __future__ import annotations

from shoal_service.core.scheduling.decide import decide
from shoal_service.simulator.named_policy import NamedPolicy
from shoal_service.simulator.peers.registry import PEERS

POLICIES: dict[str, NamedPolicy] = {
    "shoal": NamedPolicy("the service's own", lambda jobs: decide, has_rules=True, knows_clusters=True),
    **PEERS,
}
