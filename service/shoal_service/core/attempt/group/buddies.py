"""Which worker keeps a copy of which rank's snapshots: always one on another machine, and all about as many. Pure.

machine A   machine B   machine C          ranks 0 1 | 2 | 3
0 1         2           3                  0 -> 2    1 -> 3    2 -> 0    3 -> 1

A rank whose shard is also trained on another machine needs no copy (see `replicas`). On one machine no rank needs one:
the memory outlives each of its nodes, and a copy on it would not outlive the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal_service.core.attempt.group.replicas import lonely_ranks
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer


def buddies(workers: Sequence[WorkerInfo], layout: Layout) -> tuple[SnapshotServer | None, ...]:
    """By rank: the buddy's endpoint; None where a copy is not needed, or no other machine has a worker that keeps
    snapshots.

    The ranks of the fullest machines choose first. Each takes the worker with the fewest copies; among equal ones the
    next along the ring of machines.
    """
    machines = [machine_of(info) for info in workers]
    ring = list(dict.fromkeys(machines))
    crowd = Counter(machines)
    copies: Counter[int] = Counter()
    chosen: list[SnapshotServer | None] = [None] * len(workers)
    for rank in sorted(lonely_ranks(layout, machines), key=lambda r: (-crowd[machines[r]], r)):
        here = ring.index(machines[rank])

        def rank_of_choice(other: int, here: int = here) -> tuple[int, int, int]:
            distance = (ring.index(machines[other]) - here) % len(ring)
            return copies[other], distance, other

        others = [
            other for other, info in enumerate(workers) if machines[other] != machines[rank] and info.snapshot_port != 0
        ]
        if others:
            other = min(others, key=rank_of_choice)
            copies[other] += 1
            info = workers[other]
            chosen[rank] = SnapshotServer(node_id=info.node_id, host=info.node_ip, port=info.snapshot_port)
    return tuple(chosen)


def machine_of(info: WorkerInfo) -> str:
    """Equal for workers that share one memory."""
    return info.machine_id or info.node_id
