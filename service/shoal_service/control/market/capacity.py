"""What others than Shoal's jobs have reserved on the nodes of a shared Ray cluster. Reads neither store nor cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal_service.clusters.snapshot import ClusterSnapshot, Reservation
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed

_SETTLED_S = 4.0
"""Seconds within which a killed worker returns its resources, and a new one is seen to have them."""
_CREATING_S = 120.0
"""Seconds after which a worker that Ray still creates counts as one without resources: it waits for them. A worker that
has them is a process that starts, which takes some seconds; with 30 s, workers that started on a very busy machine
looked like tenants."""
_NOTHING = WorkerNeed()


@dataclass(slots=True)
class _OwnWorkers:
    """Shoal's own workers on one node."""

    workers: frozenset[tuple[str, bool]]
    """Id, and whether it is alive."""
    since_mono: float
    """Monotonic time since which exactly these workers have been there."""


class ForeignUse:
    """What others than Shoal's jobs have reserved on each node of a shared Ray cluster.

        totals of the node  -  what is free  -  what the workers of Shoal's jobs have reserved  =  what others have

    The three are read one after the other, and Ray reports a reservation some time after it was made or given back. So
    while workers of Shoal come and go on a node, the last value before that is kept: a worker that has just ended must
    not look like another tenant, and one that starts must not hide one.
    Made by the control loop; fed with each new snapshot of the cluster.
    """

    def __init__(self) -> None:
        self._known: dict[str, WorkerNeed] = {}
        """The newest certain reading of each node, by node id."""
        self._own: dict[str, _OwnWorkers] = {}
        self._created_mono: dict[str, float] = {}
        """When each worker that is being created was seen first, by its id."""

    def observe(self, snapshot: ClusterSnapshot, job_ids: Collection[str], mono: float) -> dict[str, WorkerNeed]:
        """What others have reserved, by node id; without the nodes on which they have nothing.

        Args:
            job_ids: jobs with an attempt. Workers of any other job are another service's, or are about to be ended.
        """
        creating = {reservation.worker_id for reservation in snapshot.reservations if not reservation.is_alive}
        self._created_mono = {pod: self._created_mono.get(pod, mono) for pod in creating}
        starting = {pod for pod, since in self._created_mono.items() if mono - since < _CREATING_S}
        own = [r for r in snapshot.reservations if r.job_id in job_ids and (r.is_alive or r.worker_id in starting)]
        reading = reserved_by_others(snapshot.nodes, snapshot.free, own)
        self._observe_own(snapshot, mono)
        busy = {r.node_id for r in own if not r.is_alive}
        for node_id in snapshot.free:
            is_settled = node_id not in busy and mono - self._own[node_id].since_mono >= _SETTLED_S
            if is_settled or node_id not in self._known:
                self._known[node_id] = reading.get(node_id, _NOTHING)
        self._known = {node_id: self._known[node_id] for node_id in snapshot.free}
        return {node_id: used for node_id, used in self._known.items() if used != _NOTHING}

    def _observe_own(self, snapshot: ClusterSnapshot, mono: float) -> None:
        by_node: dict[str, set[tuple[str, bool]]] = {node_id: set() for node_id in snapshot.free}
        for reservation in snapshot.reservations:
            by_node.setdefault(reservation.node_id, set()).add((reservation.worker_id, reservation.is_alive))
        before, self._own = self._own, {}
        for node_id, use in by_node.items():
            workers, known = frozenset(use), before.get(node_id)
            if known is None:
                self._own[node_id] = _OwnWorkers(workers, mono - _SETTLED_S)
            else:
                self._own[node_id] = known if known.workers == workers else _OwnWorkers(workers, mono)


def reserved_by_others(
    nodes: Sequence[Node], free: Mapping[str, WorkerNeed], own: Sequence[Reservation]
) -> dict[str, WorkerNeed]:
    """What others have reserved at this moment, by node id. A node that has not reported what is free is left out."""
    held: dict[str, list[WorkerNeed]] = {}
    for reservation in own:
        held.setdefault(reservation.node_id, []).append(reservation.need)
    reserved = {}
    for node in nodes:
        if node.alive and node.node_id in free:
            left, mine = free[node.node_id], held.get(node.node_id, [])
            used = WorkerNeed(
                cpus=_rest(node.cpus, left.cpus, [need.cpus for need in mine]),
                gpus=_rest(node.gpus, left.gpus, [need.gpus for need in mine]),
                memory_gib=_rest(node.memory_gib, left.memory_gib, [need.memory_gib for need in mine]),
            )
            if used != _NOTHING:
                reserved[node.node_id] = used
    return reserved


def _rest(total: float, free: float, own: list[float]) -> float:
    """The difference, rounded as Ray counts, in units of 0.0001: a sum of floats must not cost a worker."""
    return max(0.0, round(total - free - sum(own), 4))
