"""The workers of an attempt, and what is known of each of them and of its node."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_service.core.persistent import Table
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.messages import WorkerInfo


class AvoidedNode(Frozen):
    """A node that must not be used any longer."""

    node_id: str
    reason: str
    """Reason for people and for the incident, such as "drain requested" or "on probation: ..."."""
    deadline: float | None = None
    """Wall-clock time at which the node goes away; None if no deadline is known."""
    is_replaceable: bool = True
    """True if other nodes have room for the workers that leave this one. False if no replacement is waited for."""
    keeps_workers: bool = False
    """True if the workers on the node stay, and only new ones are not placed there (a cordon)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Why a worker is left out of groups: its node is silent, or it has not yet left the generation that went on
    without it."""

    since: float
    reason: str
    """Why the node counts as silent, for people."""
    generation: int | None = None
    """Generation whose `run` the worker has not left yet; None if it was not in `run`, or has left it."""
    answers_since: float | None = None
    """When the node began to answer again; None if it is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of the attempt, from its start to its end. `index` is unique in the attempt: it counts all workers
    that were ever started."""

    index: int
    worker_id: str
    avoids: tuple[str, ...] = ()
    """Ids of the nodes on which the worker was not to be started."""
    code: str = ""
    """Version of the job's code that the worker loads when it starts."""
    is_beside: bool = False
    """True if it was started next to a worker whose place it takes, so the cluster's scheduler counts no resources for
    it."""
    only_on: str = ""
    """Id of the node on which it was to be started, to serve the snapshots there; empty means any node with room."""
    info: WorkerInfo | None = None
    """What the worker reports about itself once it is warm; None while it starts."""
    warm_at: float | None = None
    in_run: bool = False
    """True if a `run` call to the worker is in flight."""
    acknowledged: int = 0
    """Newest lost generation whose interrupt the worker has acknowledged; 0 if none."""
    unreachable_since: float | None = None
    """Time since which all calls to the worker have failed; None if it answers."""
    left_out: LeftOut | None = None
    """Set while the worker's node is suspected to be gone: no group takes the worker until it answers. See
    losses.py."""
    leave: AvoidedNode | None = None
    """Set when the worker, not its whole node, is about to be taken away."""
    slow_until: float | None = None
    """Set for a straggler: the time until which a replacement is waited for; None if it is fast enough."""

    @property
    def warm(self) -> bool:
        return self.info is not None

    @property
    def is_node_silent(self) -> bool:
        """True if the worker is left out because its node does not answer."""
        return self.left_out is not None and self.left_out.answers_since is None

    @property
    def is_usable(self) -> bool:
        """True if the worker could train: it is warm, not unreachable, and not left out."""
        return self.info is not None and self.unreachable_since is None and self.left_out is None

    @property
    def serves_snapshots(self) -> bool:
        """True if the worker can be asked for the snapshots on its node."""
        return self.is_usable and self.info is not None and self.info.snapshot_port != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """Every worker that exists: starting, warm, or in a group."""

    workers: Table[Worker] = field(default_factory=Table)
    """Ordered by index, which only grows."""
    next_index: int = 0

    def worker(self, index: int) -> Worker | None:
        return self.workers.find(index)

    @property
    def warm(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.warm)

    @property
    def usable(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.is_usable)

    def with_new(self, worker: Worker) -> WorkerPool:
        """The pool with this worker added. Its index must be `next_index`."""
        return WorkerPool(workers=self.workers.added(worker), next_index=worker.index + 1)

    def with_worker(self, changed: Worker) -> WorkerPool:
        """The pool with this worker in place of the one of the same index."""
        return WorkerPool(workers=self.workers.replaced(changed), next_index=self.next_index)

    def without(self, index: int) -> WorkerPool:
        return WorkerPool(workers=self.workers.without(index), next_index=self.next_index)


def silent_nodes(pool: WorkerPool) -> frozenset[str]:
    """Nodes whose workers are left out because they are silent."""
    return frozenset(p.info.node_id for p in pool.workers if p.info is not None and p.is_node_silent)
