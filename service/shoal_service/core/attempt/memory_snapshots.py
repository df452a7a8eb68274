"""Snapshots in the memory of nodes: who is asked for them, which one is whole, for which nodes it is worth waiting.

    newest whole snapshot in memory     lost: nothing, or the one step that was not complete
    newest durable checkpoint           if it is newer, or no snapshot is whole
    the seed                            if there is neither

A snapshot is whole when the parts of all its shards lie on nodes where a live worker of the job serves them. Any worker
of the node can: shared memory outlives its writer, and a buddy's copy equals the original. Workers of the group report
what they hold when they leave `run`; workers outside it are asked.

When workers of a group die together, all workers of a node may be gone while their parts still lie there. Starting a
worker takes a second or two; going back to a durable checkpoint would cost all steps since:

    workers of the group die ............. `note_lost_worker` remembers their nodes
    the group has ended .................. `start_waiting`, if more than a step would be lost: WAITING, and workers
                                           start on these very nodes; on a suspected one in addition to those
                                           that train, until the next group has restored the state
    they report what lies there, or timeouts.orphans_s has passed .... the next group forms from the best known source
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal_service.core.attempt.faults import FAULTS, Memory
from shoal_service.core.attempt.messages import RequestSnapshotParts
from shoal_service.core.attempt.state import Attempt, Stage, Waiting, Worker
from shoal_service.core.attempt.turn import Decision, Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events import SnapshotsLacking, SnapshotsRecovering
from shoal_service.core.persistent import IntMap
from shoal_service.core.quantities import count_text
from shoal_workers.contract import (
    IncidentCause,
    SnapshotPart,
    SnapshotServer,
    SnapshotSource,
    SnapshotsStopped,
    life_of,
)

_BEFORE_FORMING = (Stage.QUIESCING, Stage.WAITING, Stage.FALLING_BACK)
_UNLESS_REOPENED = (Stage.STARTING, Stage.COMMITTING)
"""Stages in which the next group also forms, but all snapshots are known: no group has trained yet, or all its workers
have reported. That is not so after a restart of the supervisor."""


def ask(turn: Turn, *indexes: int) -> None:
    """Ask these workers for the snapshot parts on their nodes. The answer is waited for while it could help, and at
    most Timeouts.quiesce_s."""
    if not turn.target.keeps_snapshots:
        return
    for index in indexes:
        worker = turn.pool.worker(index)
        if worker is not None and worker.serves_snapshots:
            turn.snapshots = replace(turn.snapshots, requested=turn.snapshots.requested.with_item(index, turn.now))
            turn.do(RequestSnapshotParts(index))


def ask_if_useful(turn: Turn, index: int) -> None:
    """Ask a worker that could not be asked before, if the source of the next group is not chosen yet."""
    if turn.stage in _BEFORE_FORMING or (turn.stage in _UNLESS_REOPENED and _may_be_outdated(turn.state)):
        ask(turn, index)


def ask_others(turn: Turn) -> None:
    """Ask the warm workers outside a lost group, which may serve snapshots on the node of a worker that has died."""
    turn.snapshots = replace(turn.snapshots, requested=IntMap(), reported=IntMap())
    group = turn.group
    reporting = set(group.ranks) - (set(group.exits) if _may_be_outdated(turn.state) else set())
    ask(turn, *(worker.index for worker in turn.pool.warm if worker.index not in reporting))


def ask_again(turn: Turn) -> None:
    """Ask all idle workers after the supervisor was restarted. Its predecessor may have formed groups that trained on
    and are not in the journal, so what workers have reported before may be outdated."""
    for worker in turn.pool.warm:
        if not worker.in_run:
            ask_if_useful(turn, worker.index)


def _may_be_outdated(state: Attempt) -> bool:
    """True if an earlier supervisor has formed the last group, so what is known of its snapshots may be outdated.
    Without a group the first supervisor counts as that one: it may have formed a group that is not in the journal."""
    return max(1, life_of(state.group.generation)) < state.life


def keep_reported_parts(turn: Turn, index: int, parts: tuple[SnapshotPart, ...]) -> None:
    if index in turn.snapshots.requested:
        requested = turn.snapshots.requested.without(index)
        reported = turn.snapshots.reported.with_item(index, parts)
        turn.snapshots = replace(turn.snapshots, requested=requested, reported=reported)


def note_stopped_snapshots(turn: Turn, item: SnapshotsStopped) -> None:
    """Note that a rank of the group has no memory for snapshots. It is reported once for each rank and generation."""
    if item.rank in turn.progress.stopped:
        return
    turn.progress = replace(turn.progress, stopped={**turn.progress.stopped, item.rank: item})
    turn.emit(
        SnapshotsLacking(
            generation=item.generation,
            step=item.step,
            rank=item.rank,
            only_copies=item.only_copies,
            message=item.message,
        )
    )


def note_workers_without_memory(turn: Turn, workers: Sequence[Worker]) -> None:
    """Note the workers of a forming group that keep no snapshots because they could not open their shared memory. The
    worker's log says why."""
    if not turn.target.keeps_snapshots:
        return
    for rank, worker in enumerate(workers):
        if worker.info is not None and worker.info.snapshot_port == 0:
            stopped = SnapshotsStopped(
                generation=turn.group.generation,
                step=turn.progress.step,
                at=turn.now,
                rank=rank,
                only_copies=False,
                message=f"worker {worker.worker_id} could not use shared memory when it started; its log says why",
            )
            note_stopped_snapshots(turn, stopped)


def are_awaited(state: Attempt, now: float) -> Decision:
    """Decide if a worker that was asked may still report a newer snapshot than the best one that is known."""
    usable = {worker.index for worker in state.pool.usable}
    silent = [i for i, since in state.snapshots.requested.items() if i in usable and now < since + state.quiesce_s]
    if not silent:
        return Decision(False, "every worker that was asked has reported its snapshots, or had its time")
    known = best_source(state)
    if known is not None and known.step >= state.progress.step and not _may_be_outdated(state):
        return Decision(False, f"the snapshot of step {known.step} is whole, and none can be newer")
    return Decision(True, f"waits for {count_text(len(silent), 'worker')} to report their snapshots")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot of which every part can be read. `nodes`: by rank, the ids of the nodes from which its part can be
    read."""

    step: int
    generation: int
    world_size: int
    nodes: tuple[tuple[str, ...], ...]


def best_source(state: Attempt, next_group: Sequence[Worker] = ()) -> SnapshotSource | None:
    """Return the snapshot to restore from, served by workers of the next group where possible. None if no snapshot is
    whole, or the newest checkpoint is newer."""
    snapshot = max(_whole(state), key=lambda s: (s.step, s.generation), default=None)
    if snapshot is None or snapshot.step < state.checkpoints.durable_step:
        return None
    new_nodes = [worker.node_id for worker in next_group]
    return SnapshotSource(
        generation=snapshot.generation,
        world_size=snapshot.world_size,
        step=snapshot.step,
        parts=_choose_servers(snapshot, _servers(state, next_group), new_nodes),
    )


def newest_reported_step(state: Attempt) -> int | None:
    """Return the step of the newest snapshot of which a part was reported, whole or not; None if none was."""
    trusted = (part.step for part in _snapshot_parts(state) if _is_trusted(state, part.generation, part.step))
    return max(trusted, default=None)


def exclude_source(turn: Turn) -> None:
    """Do not choose a snapshot again that could not be read although all its servers are alive. If a server was lost,
    the snapshot may still be whole with other servers; it is excluded after a second failure."""
    source = turn.group.source
    if source is None:
        return
    this, servers = (source.generation, source.step), {_endpoint(worker) for worker in _serving(turn.state)}
    if set(source.parts) <= servers or this in turn.snapshots.doubtful:
        turn.snapshots = replace(turn.snapshots, unreadable=(*turn.snapshots.unreadable, this))
    else:
        turn.snapshots = replace(turn.snapshots, doubtful=(*turn.snapshots.doubtful, this))


def _whole(state: Attempt) -> Iterator[_Snapshot]:
    servers = {worker.node_id for worker in _serving(state)}
    nodes_by_rank: dict[tuple[int, int, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part in _snapshot_parts(state):
        if part.node_id in servers:
            nodes_by_rank[part.step, part.generation, part.world_size][part.rank].add(part.node_id)
    for (step, generation, world_size), by_rank in nodes_by_rank.items():
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
    return [worker for worker in state.pool.workers if worker.serves_snapshots]


def _servers(state: Attempt, next_group: Sequence[Worker]) -> dict[str, Worker]:
    """Choose the worker that serves each node's snapshots, by node id: one of the next group if the node has one."""
    chosen = {worker.index for worker in next_group}
    best = sorted(_serving(state), key=lambda p: (p.index not in chosen, p.index))
    return {worker.node_id: worker for worker in reversed(best)}


def _choose_servers(
    snapshot: _Snapshot, servers: dict[str, Worker], new_nodes: list[str]
) -> tuple[SnapshotServer, ...]:
    """Choose the worker that serves each part: one on the node of the new rank that needs most of the part if possible,
    otherwise on the node that serves the fewest parts; nodes of the next group come first."""
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


_MOST_WAITS = 4
"""A worker that makes progress is waited for at most timeouts.orphans_s times this number."""
_BEARABLE = 1
"""Up to this many steps are done again rather than waited for."""


def note_lost_worker(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """Remember the node of a worker of the group that was lost before it reported the snapshots there."""
    known = turn.snapshots.unreported_nodes
    if FAULTS[cause].memory is Memory.ON_NODE and worker.node_id not in ("", *known):
        turn.snapshots = replace(turn.snapshots, unreported_nodes=(*known, worker.node_id))


def forget_node(turn: Turn, node: str) -> None:
    """Forget a node whose memory can no longer be read."""
    nodes = tuple(other for other in turn.snapshots.unreported_nodes if other != node)
    turn.snapshots = replace(turn.snapshots, unreported_nodes=nodes)


def is_worth_waiting(state: Attempt) -> bool:
    """True if a node without workers is waited for, because its memory may hold steps that would be lost otherwise."""
    target, is_trusted = state.target, state.snapshots.oldest_generation <= state.group.generation
    needs_snapshot = target.desired is Desired.RUN and not target.saves_and_ends and target.keeps_snapshots
    return needs_snapshot and is_trusted and bool(_could_gain(state))


def start_waiting(turn: Turn) -> None:
    """Begin to wait for snapshots that no worker has reported. Called at most once per group that was lost."""
    until = turn.now + turn.config.timeouts.orphans_s
    turn.enter(Waiting(since=turn.now, orphans_until=until))
    turn.emit(SnapshotsRecovering(nodes=_silent_nodes(turn.state), steps=_steps_lost(turn.state), until=until))


def is_waiting(state: Attempt, now: float) -> Decision:
    """Decide if the next group still waits for a node whose snapshots no worker has reported."""
    until = waiting_until(state)
    if until is None:
        return Decision(False, "no worker was started for its node's snapshots")
    if now >= until:
        return Decision(False, f"no worker has reported the snapshots within {state.config.timeouts.orphans_s:g} s")
    return _could_gain(state)


def waiting_until(state: Attempt) -> float | None:
    """Return the wall-clock time until which the next group waits for unreported snapshots; None if it waits for none.
    The time moves on while a worker that starts there makes progress, but only a few times: a few steps are not worth a
    long wait."""
    until = state.current.orphans_until if isinstance(state.current, Waiting) else None
    if until is None:
        return None
    there = {worker.index for worker in state.pool.workers if _is_for_snapshots(worker)}
    seen = [stamp.seen_at for index, stamp in state.progress.starting.items() if index in there]
    orphans_s = state.config.timeouts.orphans_s
    later = max(seen, default=until - orphans_s) + orphans_s
    return min(max(until, later), until + (_MOST_WAITS - 1) * orphans_s)


def nodes_to_reach(state: Attempt) -> tuple[str, ...]:
    """List the ids of the nodes on which workers must start, to serve the snapshots there."""
    if waiting_until(state) is None:
        return ()
    reached = {worker.only_on for worker in state.pool.workers}
    return tuple(node for node in _silent_nodes(state) if node not in reached)


def stop_waiting(turn: Turn) -> None:
    """Stop waiting for unreported snapshots. A worker that is not warm by now is killed and started anew elsewhere,
    because it may wait for room on its node without end."""
    turn.snapshots = replace(turn.snapshots, unreported_nodes=())
    if isinstance(turn.current, Waiting):
        turn.set_stage(replace(turn.current, orphans_until=None))
    for worker in turn.pool.workers:
        if _is_for_snapshots(worker):
            turn.kill(worker.index, f"the snapshots on node {worker.only_on} are not waited for any longer")


def _is_for_snapshots(worker: Worker) -> bool:
    """True if the worker is starting to serve the snapshots on its node."""
    return bool(worker.only_on) and not worker.warm and not worker.is_beside


def _silent_nodes(state: Attempt) -> tuple[str, ...]:
    """List the ids of the nodes with unreported snapshots on which a worker may start and none answers."""
    answering = {worker.node_id for worker in state.pool.usable}
    avoided = {node.node_id for node in state.target.avoided if not node.is_suspected}
    return tuple(node for node in state.snapshots.unreported_nodes if node not in answering and node not in avoided)


def _could_gain(state: Attempt) -> Decision:
    """Decide if a node without workers may hold snapshots that are worth a wait. Survivors keep parts of the same steps
    as the workers that died: if those are no newer than the best whole snapshot, no node holds newer ones; if no
    survivor has reported, a node may."""
    nodes = _silent_nodes(state)
    if not nodes:
        return Decision(False, "every node with snapshots has a worker that answers, or must not be used")
    lost, newest = _steps_lost(state), newest_reported_step(state)
    if lost <= _BEARABLE:
        return Decision(False, f"without them the job loses {count_text(lost, 'step')}")
    if newest is not None and newest <= restorable_step(state):
        return Decision(False, f"no survivor has a part of a snapshot newer than step {restorable_step(state)}")
    where = count_text(len(nodes), "node")
    return Decision(True, f"starts workers on {where} whose memory may hold the last {count_text(lost, 'step')}")


def _steps_lost(state: Attempt) -> int:
    return state.progress.step - restorable_step(state)


def restorable_step(state: Attempt) -> int:
    """Return the newest step that can be restored, from memory or from storage."""
    known = best_source(state)
    return known.step if known is not None else state.checkpoints.durable_step
