"""When a dead node of the embedded cluster is started again: after a pause that doubles with each start in vain.

Pure; `cluster/embedded_cluster.py` carries it out. Times are monotonic. The pause lets the job re-form without the node
first, and keeps a node that dies at once (no memory, a broken disk) from taking the machine's time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_workers.contract.backoff import backoff_s

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
STEADY_S = 300.0
"""A node that has run for this long starts with the first pause again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """What is known of one node."""

    up_since_mono: float | None = None
    dead_since_mono: float | None = None
    """When it ended, or when its last start was in vain. None if it runs."""
    num_starts: int = 0
    """Starts since it last ran steadily."""

    @property
    def pause_s(self) -> float:
        return backoff_s(self.num_starts + 1, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)


def seen(life: NodeLife, runs: bool, now: float) -> NodeLife:
    """What is known of the node after a look at its raylet."""
    if not runs:
        return life if life.dead_since_mono is not None else replace(life, up_since_mono=None, dead_since_mono=now)
    if life.up_since_mono is None:
        return replace(life, up_since_mono=now, dead_since_mono=None)
    return replace(life, num_starts=0) if now - life.up_since_mono >= STEADY_S else life


def starts_at(life: NodeLife) -> float | None:
    """The time of its next start; None if it runs."""
    return None if life.dead_since_mono is None else life.dead_since_mono + life.pause_s


def started(life: NodeLife, now: float) -> NodeLife:
    """It is started; `seen` says later whether it runs."""
    return replace(life, num_starts=life.num_starts + 1, dead_since_mono=now)
