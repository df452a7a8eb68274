"""Which worker keeps a copy of which rank's snapshots: always one on another machine, and all about as many. Pure.

machine A   machine B   machine C          ranks 0 1 | 2 | 3
0 1         2           3                  0 -> 2    1 -> 3    2 -> 0    3 -> 1

A rank whose shard is also trained on another machine needs no copy (see `replicas`). On one machine no rank needs one:
the memory outlives each of its nodes, and a copy on it would not outlive the machine.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from shoal_service.core.attempt.group.replicas import lonely_ranks
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer


def buddies(workers: Sequence[WorkerInfo], layout: Layout) -> tuple[SnapshotServer | None, ...]:
    """By rank: the buddy's endpoint; None where a copy is not needed, or no other machine has a worker that keeps
    snapshots.

    The ranks of the fullest machines choose first. Each takes the worker with the fewest copies; among equal ones the
    next along the ring of machines. A choice takes logarithmic time.
    """
    machines = [machine_of(info) for info in workers]
    place = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    crowd = Counter(machines)
    shelves = _Shelves()
    for rank, info in enumerate(workers):
        if info.snapshot_port != 0:
            shelves.put(0, place[machines[rank]], rank)
    chosen: list[SnapshotServer | None] = [None] * len(workers)
    for rank in sorted(lonely_ranks(layout, machines), key=lambda r: (-crowd[machines[r]], r)):
        other = shelves.take_elsewhere(place[machines[rank]])
        if other is not None:
            info = workers[other]
            chosen[rank] = SnapshotServer(node_id=info.node_id, host=info.node_ip, port=info.snapshot_port)
    return tuple(chosen)


class _Shelves:
    """Workers by the number of copies that they keep, then by machine, then by rank."""

    def __init__(self) -> None:
        self._ranks: list[dict[int, list[int]]] = []
        """For each number of copies, by machine: a heap of ranks."""
        self._machines: list[list[int]] = []
        """The same machines, in the order of the ring."""

    def put(self, copies: int, machine: int, rank: int) -> None:
        if copies == len(self._ranks):
            self._ranks.append({})
            self._machines.append([])
        if machine not in self._ranks[copies]:
            self._ranks[copies][machine] = []
            insort(self._machines[copies], machine)
        heappush(self._ranks[copies][machine], rank)

    def take_elsewhere(self, here: int) -> int | None:
        """One of those with the fewest copies that is on another machine gets one more; None: there is none."""
        for copies, ring in enumerate(self._machines):
            if not ring or ring == [here]:
                continue
            machine = ring[bisect_right(ring, here) % len(ring)]
            rank = heappop(self._ranks[copies][machine])
            if not self._ranks[copies][machine]:
                del self._ranks[copies][machine]
                ring.remove(machine)
            self.put(copies + 1, machine, rank)
            return rank
        return None


def machine_of(info: WorkerInfo) -> str:
    """Equal for workers that share one memory."""
    return info.machine_id or info.node_id
