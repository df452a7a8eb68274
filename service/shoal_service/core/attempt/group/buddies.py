"""Which worker keeps a copy of which rank's snapshots: always one on another node, and all about as many. Pure.

node A   node B   node C          ranks 0 1 | 2 | 3
0 1      2        3               0 -> 2    1 -> 3    2 -> 0    3 -> 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal_workers.contract.messages import WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer


def buddies(workers: Sequence[WorkerInfo]) -> tuple[SnapshotServer | None, ...]:
    """By rank: the buddy's endpoint; None where no other node has a worker that keeps snapshots.

    The ranks of the fullest nodes choose first. Each takes the worker with the fewest copies; among equal ones the next
    along the ring of nodes.
    """
    ring = list(dict.fromkeys(info.node_id for info in workers))
    crowd = Counter(info.node_id for info in workers)
    copies: Counter[int] = Counter()
    chosen: list[SnapshotServer | None] = [None] * len(workers)
    for rank in sorted(range(len(workers)), key=lambda r: (-crowd[workers[r].node_id], r)):
        here = ring.index(workers[rank].node_id)

        def rank_of_choice(other: int, here: int = here) -> tuple[int, int, int]:
            distance = (ring.index(workers[other].node_id) - here) % len(ring)
            return copies[other], distance, other

        others = [
            other
            for other, info in enumerate(workers)
            if info.node_id != workers[rank].node_id and info.snapshot_port != 0
        ]
        if others:
            other = min(others, key=rank_of_choice)
            copies[other] += 1
            info = workers[other]
            chosen[rank] = SnapshotServer(node_id=info.node_id, host=info.node_ip, port=info.snapshot_port)
    return tuple(chosen)
