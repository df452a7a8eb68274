"""Supervisors after the first one: from a stale journal, and beside a predecessor that was only believed dead.

The journal is stale if the head was away: the predecessor went on, and its successor does not know what it did since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kit.worlds.attempt.parts import from_journal
from kit.worlds.attempt.world import World
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import Event, Order, Run, RunReturned, Tick, WorkerLost
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import Worker
from shoal_service.planner import plan
from shoal_workers.contract.ids import life_of
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ExitKind, WorkerExit


@dataclass(frozen=True)
class Entry:
    """What the journal held at some time, and how far the world was then."""

    state: Attempt
    issued: tuple[Order, ...]
    known: frozenset[str]
    num_commands: int
    num_events: int


def entry_of(world: World) -> Entry:
    return Entry(world.state, tuple(world.issued), frozenset(world.known), len(world.commands), len(world.history))


def restart_from(world: World, entry: Entry) -> None:
    """The supervisor dies, and its successor reads this entry. What was not pulled since is lost."""
    del world.commands[entry.num_commands :], world.history[entry.num_events :]
    world.known, world.issued = set(entry.known), list(entry.issued)
    world.pending, world.dies_after = {}, None
    world.state = replace(from_journal(entry.state), life=world.state.life)
    pool = {worker.index for worker in entry.state.pool.workers}
    world.known_gone -= pool
    world.strays = {index for index in world.workers if index >= entry.state.pool.next_index}
    for index in world.strays:
        _leave(world, index)  # the others leave its generation, so its collectives break
    to_run = {order.index for order in entry.issued if isinstance(order, Run)}
    for worker in entry.state.pool.workers:
        if worker.index in world.workers:
            _adopt(world, worker, is_to_run=worker.index in to_run)
    world.restart_supervisor()


def _adopt(world: World, worker: Worker, *, is_to_run: bool) -> None:
    index, generation = worker.index, world.state.group.generation
    real = world.workers[index]
    if not real.alive:
        message = "the worker was gone when the supervisor was restarted"
        world.post(f"lost-{index}", WorkerLost(index, IncidentCause.WORKER_DIED, "name lookup", message))
        return
    if not worker.warm:
        real.is_warm = False  # it is prepared again, and answers again
    if real.run is not None and real.run.generation > generation:
        _leave(world, index)
    has_left = (index, generation) in world.left
    if worker.in_run and real.run is None and (has_left or not is_to_run):
        rank = world.state.group.rank_of(index) or 0
        stale = WorkerExit(
            generation=generation,
            rank=rank,
            kind=ExitKind.STALE,
            step=0,
            snapshot_parts=world.held_on(real.node_id),
        )
        world.post(f"exit-{index}", RunReturned(index, stale))


def _leave(world: World, index: int) -> None:
    real = world.workers[index]
    if real.run is not None:
        world.left.add((index, real.run.generation))
    real.run, real.fenced, real.yields = None, False, None


def reorder_answers(world: World, permuted: Callable[[list[Any]], list[Any]]) -> None:
    """Every answer arrives, in another order: each is a call. Only the reports of one worker have an order."""
    answers = sorted(name for name in world.pending if not name.startswith("reports"))
    for name in answers:
        world.pending[name] = permuted(world.pending[name])
    for name in permuted(answers):
        while name in world.pending:
            world.deliver(name)


@dataclass
class Zombie:
    """A supervisor that has a successor and does not know of it. Its workers refuse it; its decisions go on."""

    state: Attempt
    now: float

    def witnesses(self) -> list[Event]:
        """What it may receive: time passes, its workers refuse it, or leave their generation for its successor."""
        group, workers = self.state.group, self.state.pool.workers
        lost = [WorkerLost(w.index, IncidentCause.WORKER_DIED, "port", "it refused") for w in workers]
        exits = {
            w.index: WorkerExit(
                generation=group.generation,
                rank=group.rank_of(w.index) or 0,
                kind=ExitKind.COLLECTIVE_FAILED,
                step=self.state.progress.step,
            )
            for w in workers
            if w.in_run
        }
        return [Tick(), *lost, *(RunReturned(index, left) for index, left in exits.items())]

    def goes_on(self, event: Event, seconds: float) -> list[int]:
        """The generations that it would form."""
        self.now += seconds
        formed = []
        for one in (event, Tick()):
            self.state, commands = machine.step(self.state, one, self.now, plan)
            formed += [command.assignment.generation for command in commands if isinstance(command, Run)]
        assert all(life_of(generation) == self.state.life for generation in formed)
        return formed
