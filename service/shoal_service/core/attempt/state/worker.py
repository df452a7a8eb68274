"""What is known of one worker and of its node. Values only, parts of `state.Attempt`."""

from __future__ import annotations

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.messages import Phase, WorkerInfo


class AvoidedNode(Frozen):
    """A node that must not be used any longer."""

    node_id: str
    reason: str
    """For people and for the incident: "drain requested", "on probation: ..."."""
    deadline: float | None = None
    """Wall-clock time at which it goes away; None: there is time."""


class NodeLoss(Frozen):
    """A worker was lost on this node."""

    node_id: str
    at: float


class Hang(Frozen):
    """The last hang that was seen."""

    step: int
    """Completed steps at the time."""
    index: int
    """The worker that it points at."""
    is_repeated: bool = False
    """The group has hung at this step before."""


class Worker(Frozen):
    """One shard worker. `index` counts the workers that the attempt ever started."""

    index: int
    worker_id: str
    started_at: float
    avoids: tuple[str, ...] = ()
    """Ids of the nodes on which it was not to be started."""
    only_on: str = ""
    """Id of the one node on which it was to be started, for what lies in its memory; empty: wherever there is room."""
    info: WorkerInfo | None = None
    """None while it starts; set once it is warm."""
    warm_at: float | None = None
    in_run: bool = False
    """A `run` call is in flight."""
    unreachable_since: float | None = None
    """Calls to it fail, and nothing was acknowledged of it since."""
    leave: AvoidedNode | None = None
    """The worker (not its whole node) is about to be taken away."""
    slow_until: float | None = None
    """It computes too slowly for the others; so long a replacement is waited for."""

    @property
    def warm(self) -> bool:
        return self.info is not None


class LastBeat(Frozen):
    """The newest change of a member's beat in this generation."""

    beat: int
    step: int
    phase: Phase
    at: float
    """By the worker's own clock."""
    seen_at: float
    """By our clock: when it was acknowledged of, less how long it had stood still by then."""
