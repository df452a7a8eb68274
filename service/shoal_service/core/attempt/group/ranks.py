"""Which workers form the next group, and in which rank. Pure; called by `forming` and `switching`.

A worker of the last group keeps its rank if possible, so that its state stays where it is. The rank of a lost worker
goes to a warm spare; if there is none, the later ranks close up, in order.

    0 1 2 3  rank 1 dies   a spare 4: 0 4 2 3     no spare: 0 2 3
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from shoal_service.core.attempt import nodes
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.hardware_profile import Racks


def next_workers(state: Attempt, now: float) -> tuple[Worker, ...]:
    """Workers up to the grant, in the usual rank order. `placement.choice` may take other candidates, and in another
    order, once the layout is known."""
    return _in_order(state, {p.index: p for p in candidates(state, now)})


def candidates(state: Attempt, now: float) -> list[Worker]:
    """Usable workers, also more than the grant. Stragglers are taken only if the group is smaller without them.
    Workers that have to leave are taken only if the group would be below elasticity.min_workers without them, and not
    at all once their deadline has come."""
    order = state.group.ranks
    usable = sorted(state.usable, key=lambda p: (order.get(p.index, len(order)), p.index))
    leaving = nodes.leaving_nodes(state)
    staying = [p for p in usable if p.leave is None and p.info is not None and p.info.node_id not in leaving]
    chosen = [p for p in staying if p.slow_until is None]
    if len(chosen) < state.target.granted:
        chosen += [p for p in staying if p.slow_until is not None][: state.target.granted - len(chosen)]
    missing = min(state.target.min_workers, state.target.granted) - len(chosen)
    if missing > 0:
        stay = {p.index for p in staying}
        chosen += [p for p in usable if p.index not in stay and not nodes.is_due(state, p, now)][:missing]
    return chosen


def racks_of(workers: Iterable[Worker]) -> Racks:
    """How many of these workers each node has, by rack. Nodes whose rack is not known count as one rack."""
    racks: dict[str, Counter[str]] = defaultdict(Counter)
    for worker in workers:
        if worker.info is not None:
            racks[worker.info.rack][worker.info.node_id] += 1
    return tuple(tuple(nodes.values()) for nodes in racks.values())


def is_settled(state: Attempt, now: float) -> bool:
    """No worker is missing, or none has become warm for a while: the first group waits longer than others."""
    workers, timeouts = state.workers, state.config.timeouts
    if len(workers) >= state.target.granted and all(worker.warm for worker in workers):
        return True
    newest = max((worker.warm_at or 0.0 for worker in workers if worker.warm), default=now)
    return now - newest >= (timeouts.gather_s if state.stage is Stage.STARTING else timeouts.settle_s)


def _in_order(state: Attempt, available: dict[int, Worker]) -> tuple[Worker, ...]:
    size = min(state.target.granted, len(available))
    ranks = state.group.ranks
    staying = set([index for index in state.group.workers if index in available][:size])
    spares = deque(sorted(index for index in available if index not in ranks)[: size - len(staying)])
    order = []
    for index in state.group.workers:
        if index in staying:
            order.append(index)
        elif spares and index not in available:
            order.append(spares.popleft())
    return tuple(available[index] for index in [*order, *spares])
