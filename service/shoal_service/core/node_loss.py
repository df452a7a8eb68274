"""What the loss of one worker or one node would cost a job now: the values that status, metrics and incidents show.

`core/attempt/` decides them; the supervisor reports them.
"""

from __future__ import annotations

from enum import StrEnum

from shoal_service.core.quantities import count_text
from shoal_workers.contract import Frozen


class Protection(StrEnum):
    """Where the state of a lost node comes from, best first."""

    REPLICAS = "replicas"
    """Other nodes train replicas of every shard."""
    SHARED_MEMORY = "shared_memory"
    """The nodes are on one machine, and its memory outlives each of them."""
    COPIES = "copies"
    """Copies of the whole state on other nodes."""
    CHECKPOINT = "checkpoint"
    """Nothing in memory: the newest checkpoint, or the seed."""


class WorkerLossBound(Frozen):
    """The bound in force, if workers die but no machine is lost."""

    at_most: int | None
    """Completed steps that are repeated at most; null: not limited by a number of steps."""
    reason: str = ""
    """Why more than one step may be."""

    def describe(self) -> str:
        return _describe_limit(self.at_most) + (f": {self.reason}" if self.reason else "")


class NodeLossBound(Frozen):
    """The bound in force."""

    protection: Protection
    at_most: int | None
    """Completed steps that the loss of a node costs at most; null: not limited by a number of steps."""
    now: int
    """Completed steps that it would cost now, at the newest completed step."""
    every_steps: float | None = None
    """Steps between two copies of the whole state on other nodes; null: there are none."""
    reason: str = ""
    """Why the bound is not a better one."""

    def describe(self) -> str:
        every = "step" if self.every_steps in (1, None) else f"{self.every_steps:g} steps"
        sources = {
            Protection.REPLICAS: "other nodes have replicas",
            Protection.SHARED_MEMORY: "all nodes are on one machine, whose memory outlives them",
            Protection.COPIES: f"copies on other nodes after every {every}",
            Protection.CHECKPOINT: "from the last checkpoint",
        }
        source = "; ".join(filter(None, (sources[self.protection], self.reason)))
        return f"losing a node {_describe_limit(self.at_most)}, {self.now} now ({source})"


def _describe_limit(at_most: int | None) -> str:
    return (
        "repeats the steps since the last checkpoint"
        if at_most is None
        else f"repeats at most {count_text(at_most, 'step')}"
    )
