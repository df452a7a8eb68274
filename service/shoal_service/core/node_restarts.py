"""Decides when a dead node of the embedded cluster is started again.

The pause before a start doubles with each start that failed. It lets the job re-form without the node first, and keeps
a node that dies at once (no memory, a broken disk) from taking the machine's time. Pure; times are monotonic.
`cluster/embedded_cluster.py` starts the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_workers.contract.backoff import backoff_s

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
STEADY_S = 300.0
"""A node that has run for this long starts with the first pause again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """When one node came up or ended, and how often it was started since."""

    up_since_mono: float | None = None
    dead_since_mono: float | None = None
    """When it ended, or when its last start failed. None if it runs."""
    num_starts: int = 0
    """Starts since it last ran steadily."""

    @property
    def next_start_mono(self) -> float | None:
        """Time at which the node is due to start again; None if it runs."""
        if self.dead_since_mono is None:
            return None
        return self.dead_since_mono + backoff_s(self.num_starts + 1, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)

    def record_check(self, runs: bool, now: float) -> NodeHistory:
        """Return the history after a check of the node's raylet."""
        if not runs:
            return self if self.dead_since_mono is not None else replace(self, up_since_mono=None, dead_since_mono=now)
        if self.up_since_mono is None:
            return replace(self, up_since_mono=now, dead_since_mono=None)
        return replace(self, num_starts=0) if now - self.up_since_mono >= STEADY_S else self

    def record_start(self, now: float) -> NodeHistory:
        """Return the history after a start. The next `record_check` finds out whether the node runs."""
        return replace(self, num_starts=self.num_starts + 1, dead_since_mono=now)
