"""Which orders still wait for their answer: those that a restarted supervisor repeats. Pure; called by the executor.

The supervisor may have died before it performed an order, or after, when its answer was lost with it. Its successor
cannot distinguish the two, so every order can be repeated: a worker recognises a `run` of a generation that it has run
already, fences and requests only grow, a checkpoint is committed once, and only one worker can have a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from shoal_service.core.attempt.commands import (
    Command,
    Commit,
    CompareModels,
    FindCheckpoint,
    ForgetDamaged,
    Interrupt,
    KillWorker,
    NoteCommit,
    Order,
    RequestSnapshotParts,
    RequestYield,
    Run,
    StartWorker,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import FallingBack, Opening, Stage

_TRAINING = (Stage.RUNNING, Stage.SWITCHING)


def unanswered(orders: Mapping[int, Order], state: Attempt) -> dict[int, Order]:
    """The numbered orders whose answer is missing in this state and would still matter."""
    in_run = frozenset(state.in_run)
    return {number: order for number, order in orders.items() if _is_unanswered(order, state, in_run)}


def still_due(commands: Sequence[Command], state: Attempt) -> list[Command]:
    """The commands of a turn of several events, without the requests that a later event of the turn has answered, such
    as the interrupt of a worker that had left already."""
    in_run = frozenset(state.in_run)
    requests = (Interrupt, RequestYield, RequestSnapshotParts)
    return [c for c in commands if not isinstance(c, requests) or _is_unanswered(c, state, in_run)]


def _is_unanswered(order: Order, state: Attempt, in_run: frozenset[int]) -> bool:
    match order:
        case FindCheckpoint():
            return isinstance(state.current, (Opening, FallingBack)) and state.current.search.retry_at is None
        case StartWorker(index=index):
            worker = state.pool.worker(index)
            return worker is not None and not worker.warm
        case Run(index=index, assignment=assignment):
            is_current = assignment.generation == state.group.generation and index in in_run
            return is_current and not state.group.is_formed  # a formed group: all its workers have their assignments
        case Interrupt(index=index, generation=generation):
            worker = state.pool.worker(index)
            if worker is not None and worker.left_out is not None:
                return worker.left_out.generation == generation
            is_current = generation == state.group.generation and index in in_run
            return is_current and state.stage is Stage.QUIESCING
        case RequestYield(index=index, generation=generation):
            is_current = generation == state.group.generation and index in in_run
            return is_current and state.stage is Stage.SWITCHING
        case NoteCommit(index=index, generation=generation):
            return generation == state.group.generation and index in in_run and state.stage in _TRAINING
        case RequestSnapshotParts(index=index):
            return index in state.snapshots.requested and state.pool.worker(index) is not None
        case CompareModels(index=index):
            warming = state.code.warming
            return warming is not None and warming.comparing and state.pool.worker(index) is not None
        case Commit(name=name):
            return name in state.checkpoints.committing and state.stage is not Stage.ENDED
        case KillWorker() | ForgetDamaged():
            return True  # the machine forgets what it has ended; the executor knows when it is done
        case _:
            assert_never(order)
