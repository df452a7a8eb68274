"""ForeignUse: what others than Shoal's jobs have reserved on each node of a shared Ray cluster.

    totals of the node  -  what is free  -  what the workers of Shoal's jobs have reserved  =  what others have

The three are read one after the other, and Ray reports a reservation some time after it was made or given back. So an
amount counts only once it has lasted for some seconds: a worker that has just ended must not look like another tenant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from shoal_service.control.protocols import ClusterSnapshot, Reservation
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed

_LASTS_S = 4.0
"""A killed worker returns its resources within this time."""
_CREATING_S = 30.0
"""A worker that Ray creates for longer than this has no resources: it waits for them. One that has them is a process
that starts, which takes some seconds."""
_NOTHING = WorkerNeed()


class ForeignUse:
    """Made by the control loop; fed with each new snapshot of the cluster."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, dict[str, WorkerNeed]]] = deque()
        self._created_mono: dict[str, float] = {}
        """When each worker that is being created was seen first, by its id."""

    def observe(self, snapshot: ClusterSnapshot, job_ids: Collection[str], mono: float) -> dict[str, WorkerNeed]:
        """What others have reserved for some seconds by now, by node id; without the nodes on which they have nothing.

        Args:
            job_ids: jobs with an attempt. Workers of any other job are another service's, or are about to be ended.
        """
        creating = {r.worker_id for r in snapshot.reservations if not r.is_alive}
        self._created_mono = {one: self._created_mono.get(one, mono) for one in creating}
        own = [r for r in snapshot.reservations if r.job_id in job_ids and self._holds(r, mono)]
        now = reserved_by_others(snapshot.nodes, snapshot.free, own)
        while self._recent and mono - self._recent[0][0] > _LASTS_S:
            self._recent.popleft()
        self._recent.append((mono, now))
        return {node_id: least for node_id in now if (least := self._least(node_id)) != _NOTHING}

    def _holds(self, reservation: Reservation, mono: float) -> bool:
        return reservation.is_alive or mono - self._created_mono[reservation.worker_id] < _CREATING_S

    def _least(self, node_id: str) -> WorkerNeed:
        """Of the last seconds."""
        seen = [used.get(node_id, _NOTHING) for _, used in self._recent]
        return WorkerNeed(
            cpus=min(one.cpus for one in seen),
            gpus=min(one.gpus for one in seen),
            memory_gib=min(one.memory_gib for one in seen),
        )


def reserved_by_others(
    nodes: Sequence[Node], free: Mapping[str, WorkerNeed], own: Sequence[Reservation]
) -> dict[str, WorkerNeed]:
    """At this moment, by node id. Nothing is known of a node that has not reported what is free."""
    held: dict[str, list[WorkerNeed]] = {}
    for reservation in own:
        held.setdefault(reservation.node_id, []).append(reservation.need)
    found = {}
    for node in nodes:
        if node.alive and node.node_id in free:
            left, mine = free[node.node_id], held.get(node.node_id, [])
            used = WorkerNeed(
                cpus=_rest(node.cpus, left.cpus, [need.cpus for need in mine]),
                gpus=_rest(node.gpus, left.gpus, [need.gpus for need in mine]),
                memory_gib=_rest(node.memory_gib, left.memory_gib, [need.memory_gib for need in mine]),
            )
            if used != _NOTHING:
                found[node.node_id] = used
    return found


def _rest(total: float, free: float, own: list[float]) -> float:
    """Rounded as Ray counts, in units of 0.0001: a sum of floats must not cost a worker."""
    return max(0.0, round(total - free - sum(own), 4))
