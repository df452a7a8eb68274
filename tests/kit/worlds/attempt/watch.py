"""What must hold for each command that the machine gives, whatever has happened. Fails the test that is running."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from kit.worlds.attempt.parts import (
    MEMORY_PORT,
    ROOT,
    name_of,
)
from shoal_service.core.attempt.messages import (
    Emit,
    Run,
    RunReturned,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.endings import AttemptEnd
from shoal_workers.contract.ids import next_generation
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource

_FRUITLESS = 6
"""At most this many re-formations in a row may complete no step."""

if TYPE_CHECKING:
    from kit.worlds.attempt.commanded import Commanded


class Watch:
    def __init__(self, world: Commanded) -> None:
        self._world = world
        self._trained: set[int] = set()
        """Workers that had a rank in the last group."""

    def change(self, before: Attempt, after: Attempt) -> None:
        generations = (before.group.generation, next_generation(before.group.generation, before.life))
        assert after.group.generation in generations and after.life == before.life
        if before.checkpoints.newest is not None and before.checkpoints.newest not in after.checkpoints.damaged:
            assert after.checkpoints.newest is not None
            assert name_of(after.checkpoints.newest) >= name_of(before.checkpoints.newest)
        assert after.stage is not Stage.ENDED or after.pool.workers == ()

    def runs(self, runs: list[Run]) -> None:
        world = self._world
        state = world.state
        assert len(runs) <= state.target.granted
        if state.target.spec.parallelism == "auto":  # else some may idle
            assert state.target.min_workers <= len(runs)
        assert [c.assignment.rank for c in runs] == list(range(len(runs)))
        assert {c.assignment.generation for c in runs} == {state.group.generation}
        assert {c.assignment.world_size for c in runs} == {len(runs)}
        assert len({(c.assignment.store_host, c.assignment.store_port, c.assignment.layout) for c in runs}) == 1
        newest = max((name_of(name) for name in world.known), default=None)
        origin = state.target.spec.continue_from
        expected = f"{ROOT}/{newest}" if newest is not None else origin.url if origin is not None else None
        assert {c.assignment.restore_from for c in runs} == {expected}, "not the newest good checkpoint"
        source = runs[0].assignment.restore_snapshot
        assert all(c.assignment.restore_snapshot == source for c in runs)
        if source is not None:
            self._source(source, newest)
        self._nothing_better(source.step if source is not None else state.checkpoints.durable_step)
        self._buddies(runs)
        self._tp_groups(runs)
        for worker in world.workers.values():
            known = state.pool.worker(worker.index)
            is_left_out = known is not None and known.left_out is not None
            assert not (worker.alive and worker.run) or is_left_out, f"{worker} still runs an older generation"
        for command in runs:
            started = state.pool.worker(command.index)
            is_sent = started.only_on in state.target.suspected and not started.is_beside
            assert not is_sent or command.index in self._trained, "it was started only to serve snapshots"
            assert world.is_believed_alive(command.index) and started.warm
        self._trained = {command.index for command in runs}

    def _source(self, source: SnapshotSource, newest: CheckpointName | None) -> None:
        world = self._world
        assert newest is None or source.step >= newest.step, "what is durable is newer"
        assert len(source.parts) == source.world_size
        assert (source.generation, source.step) in world.states, "no group was ever there"
        for rank, endpoint in enumerate(source.parts):
            server = world.workers[endpoint.port - MEMORY_PORT]
            assert world.is_believed_alive(server.index) and server.is_warm and server.node_id == endpoint.node_id
            if not any(p.alive and p.node_id == endpoint.node_id for p in world.workers.values()):
                continue  # the node has died with its memory, and that is not acknowledged yet
            held = [(h.generation, h.rank, h.step) for h in world.held_on(endpoint.node_id)]
            assert (source.generation, rank, source.step) in held, "no worker reported it there"

    def _nothing_better(self, step: int) -> None:
        """The newest snapshot of the last trained group that is whole in the memory of answering nodes is used, if its
        workers had the time to report it."""
        world = self._world
        state = world.state
        servers = [world.workers[p.index] for p in state.pool.usable if p.info.snapshot_port]
        if any(p.is_stopped or not p.alive for p in servers) or any(name.startswith("held") for name in world.pending):
            return
        found: dict[tuple[int, int, int], set[int]] = {}
        for node_id in {p.node_id for p in servers}:
            for held in world.held_on(node_id):
                found.setdefault((held.step, held.generation, held.world_size), set()).add(held.rank)
        for (better, generation, world_size), ranks in found.items():
            known = state.snapshots
            usable = generation >= known.oldest_generation and (generation, better) not in known.unreadable
            out = known.discarded
            usable = usable and not (out is not None and out.first <= generation <= out.last)
            usable = usable and generation == max(generation for generation, _ in world.states)
            assert better <= step or not usable or len(ranks) < world_size, f"step {better} is whole in memory"

    def _buddies(self, runs: list[Run]) -> None:
        world = self._world
        nodes = {c.assignment.rank: world.workers[c.index].node_id for c in runs}
        copies: dict[SnapshotServer, int] = {}
        for command in runs:
            buddy = command.assignment.buddy
            run = command.assignment
            others = {node for rank, node in nodes.items() if run.layout.shard_of(rank) == run.shard}
            is_first = all(run.layout.shard_of(rank) != run.shard for rank in range(run.rank))
            is_needed = len(others) == 1 and is_first  # its replicas are all on one node
            expected = len(set(nodes.values())) > 1 and world.state.target.keeps_snapshots and is_needed
            assert (buddy is not None) == expected
            if buddy is not None:
                assert buddy.node_id != nodes[command.assignment.rank] and buddy.node_id in nodes.values()
                copies[buddy] = copies.get(buddy, 0) + 1

    def _tp_groups(self, runs: list[Run]) -> None:
        """No other order of these workers has fewer tp groups that cross nodes."""
        tp, nodes = runs[0].assignment.layout.tp, [self._world.workers[c.index].node_id for c in runs]
        inside = sum(len(set(nodes[first : first + tp])) == 1 for first in range(0, len(nodes), tp))
        assert inside == sum(count // tp for count in Counter(nodes).values())

    def end(self, end: AttemptEnd) -> None:
        """A job that makes progress, be it towards a step at which it has been before, is not ended for making none."""
        if end.reason is not EndReason.RECOVERY_BUDGET:
            return
        emitted = [c.event for c in self._world.commands if isinstance(c, Emit)]
        formed = [e for e in emitted if e.type in ("generation.forming", "generation.formed")]
        forming = [at for at, event in enumerate(formed) if event.type == "generation.forming"]
        starts = [e.data()["start_step"] for e in formed if e.type == "generation.formed"]
        if "completed no step" in end.message:
            newest = [e.data()["start_step"] for e in formed[forming[-_FRUITLESS] :] if e.type == "generation.formed"]
            advanced = sum(start > before for before, start in pairwise(newest))
            assert advanced <= 1, f"groups began at {newest}: {end.message}"  # one: where it had been, and no further
        elif "had to begin at an earlier step" in end.message:
            assert sum(start < before for before, start in pairwise(starts)) > _FRUITLESS, f"{starts}: {end.message}"

    def call(self, index: int, generation: int) -> None:
        world = self._world
        assert world.is_believed_alive(index), "a call to a worker that is known to be gone"
        known = world.state.pool.worker(index)
        left_out = known.left_out if known is not None else None
        assert generation == (left_out.generation if left_out is not None else world.state.group.generation)
        returned = [e for e in world.history if isinstance(e, RunReturned) and e.index == index]
        assert all(e.exit.generation != generation for e in returned), "it has left this generation"
