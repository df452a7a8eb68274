"""Where the state of the next group comes from: the cheapest whole source. Pure; called by `forming` and `follow_up`.

    newest whole snapshot in memory     lost: nothing, or the one step that was not complete
    newest durable checkpoint           if it is newer, or no snapshot is whole
    the seed                            if there is neither

A snapshot is whole when the parts of all its shards lie on nodes where a live worker of the job serves them. Any
worker of the node can: shared memory outlives its writer, and a buddy's copy equals the original. A shard that several
replicas train is read from any of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.worker import Worker
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotServer, SnapshotSource


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A whole snapshot. `nodes`: by rank, the nodes from which its part can be read."""

    step: int
    generation: int
    world_size: int
    nodes: tuple[tuple[str, ...], ...]


def best_source(state: Attempt, next_group: Sequence[Worker] = ()) -> SnapshotSource | None:
    """The snapshot to restore from, served by workers of the next group where possible; None: no snapshot is whole, or
    the newest checkpoint is newer."""
    snapshot = max(_whole(state), key=lambda s: (s.step, s.generation), default=None)
    if snapshot is None or snapshot.step < state.checkpoints.durable_step:
        return None
    return SnapshotSource(
        generation=snapshot.generation,
        world_size=snapshot.world_size,
        step=snapshot.step,
        parts=_parts(
            snapshot, _servers(state, next_group), [worker.info.node_id for worker in next_group if worker.info]
        ),
    )


def newest_kept(state: Attempt) -> int | None:
    """Step of the newest snapshot of which a part was reported, whole or not; None: none was."""
    trusted = (h.step for h in _snapshot_parts(state) if _is_trusted(state, h.generation, h.step))
    return max(trusted, default=None)


def is_served(state: Attempt, source: SnapshotSource) -> bool:
    """Whether every worker that was to serve the source is still alive. If so, a part that could not be read is missing
    or damaged."""
    alive = {_endpoint(p) for p in _serving(state)}
    return set(source.parts) <= alive


def _whole(state: Attempt) -> Iterator[_Snapshot]:
    servers = {p.info.node_id for p in _serving(state) if p.info}
    found: dict[tuple[int, int, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for holding in _snapshot_parts(state):
        if holding.node_id in servers:
            key = (holding.step, holding.generation, holding.world_size)
            found[key][holding.rank].add(holding.node_id)
    for (step, generation, world_size), by_rank in found.items():
        if _is_trusted(state, generation, step) and set(by_rank) >= set(range(world_size)):
            nodes = tuple(tuple(sorted(by_rank[rank])) for rank in range(world_size))
            yield _Snapshot(step, generation, world_size, nodes)


def _is_trusted(state: Attempt, generation: int, step: int) -> bool:
    known = state.snapshots
    if known.discarded is not None and known.discarded.first <= generation <= known.discarded.last:
        return False
    return generation >= known.oldest_generation and (generation, step) not in known.unreadable


def _snapshot_parts(state: Attempt) -> Iterator[SnapshotPart]:
    for worker_exit in state.group.exits.values():
        yield from worker_exit.snapshot_parts
    for snapshot_parts in state.snapshots.reported.values():
        yield from snapshot_parts


def _serving(state: Attempt) -> list[Worker]:
    return [p for p in state.pool.usable if p.info is not None and p.info.snapshot_port != 0]


def _servers(state: Attempt, next_group: Sequence[Worker]) -> dict[str, Worker]:
    """By node: the worker that serves it, one of the next group if there is one."""
    chosen = {worker.index for worker in next_group}
    best = sorted(_serving(state), key=lambda p: (p.index not in chosen, p.index))
    return {p.info.node_id: p for p in reversed(best) if p.info}


def _parts(snapshot: _Snapshot, servers: dict[str, Worker], new_nodes: list[str]) -> tuple[SnapshotServer, ...]:
    """One worker per part: on the node of the new rank that needs most of it, else the one that serves fewest."""
    served: Counter[str] = Counter()
    parts, new = [], frozenset(new_nodes)
    for rank, nodes in enumerate(snapshot.nodes):
        near = new_nodes[rank * len(new_nodes) // snapshot.world_size] if new_nodes else ""
        node = min(nodes, key=lambda n: (n != near, n not in new, served[n], n))
        served[node] += 1
        parts.append(_endpoint(servers[node]))
    return tuple(parts)


def _endpoint(worker: Worker) -> SnapshotServer:
    info = worker.info
    assert info is not None
    return SnapshotServer(node_id=info.node_id, host=info.node_ip, port=info.snapshot_port)
